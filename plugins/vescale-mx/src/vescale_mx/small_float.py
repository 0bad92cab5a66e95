"""Floats of 4, 6 and 8 bits as codes in uint8: rounding to nearest, ties to even, and back. OCP MX specification v1.0.

format   sign exponent mantissa   largest    least normal   least subnormal
E4M3        1        4        3       448           2**-6             2**-9
E5M2        1        5        2     57344          2**-14            2**-16
E3M2        1        3        2        28           2**-2             2**-4
E2M3        1        2        3       7.5               1               1/8
E2M1        1        2        1         6               1               1/2
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

__all__ = ["E2M1", "E2M3", "E3M2", "E4M3", "E5M2", "SmallFloat"]

_BIAS, _MANTISSA_BITS = 127, 23
"""Of float32."""


@dataclass(frozen=True)
class SmallFloat:
    """A float of 1 + `exponent_bits` + `mantissa_bits` bits, whose finite values end at `largest`."""

    exponent_bits: int
    mantissa_bits: int
    largest: float
    dtype: torch.dtype | None = None
    """torch's own, where it has one that holds one value per element."""

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def largest_exponent(self) -> int:
        """Of the largest power of two: `emax_elem` of the specification."""
        return math.frexp(self.largest)[1] - 1

    @property
    def _least_exponent(self) -> int:
        return 2 - (1 << (self.exponent_bits - 1))

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """float32 to codes; what is larger than `largest` saturates, nan becomes some code."""
        values = values.clamp(-self.largest, self.largest)
        if self.dtype is not None:
            return values.to(self.dtype).view(torch.uint8)
        magnitude, least = values.abs().nan_to_num_(0.0), 2.0**self._least_exponent
        # Codes are counted up to the least normal value by one rule and from there on by the other.
        codes = self._subnormal(magnitude.clamp(max=least)) + self._normal(magnitude.clamp(min=least))
        codes -= 1 << self.mantissa_bits
        return codes.to(torch.uint8) | values.signbit().to(torch.uint8) << (self.bits - 1)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes to float32, exactly."""
        # On CPUs a fifth of the time of a cast from float8, and of table[codes].
        return _table(self, codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)

    def _normal(self, magnitude: torch.Tensor) -> torch.Tensor:
        """Drop mantissa bits of the float32 pattern, to nearest even; a carry moves into the exponent, as it should."""
        pattern = magnitude.view(torch.int32)
        dropped = _MANTISSA_BITS - self.mantissa_bits
        odd = (pattern >> dropped) & 1
        kept = (pattern + (odd + ((1 << (dropped - 1)) - 1))) >> dropped
        return kept - ((_BIAS - 1 + self._least_exponent) << self.mantissa_bits)

    def _subnormal(self, magnitude: torch.Tensor) -> torch.Tensor:
        """How many of the least subnormal: adding a float whose last bit is worth one of those rounds to even."""
        anchor = torch.tensor(2.0 ** (_MANTISSA_BITS + self._least_exponent - self.mantissa_bits))
        return (magnitude + anchor.item()).view(torch.int32) - int(anchor.view(torch.int32))


@functools.cache
def _table(element: SmallFloat, device: torch.device) -> torch.Tensor:
    """The float32 value of every code."""
    with torch.inference_mode(False):  # a constant that serving and training share
        if element.dtype is not None:
            return torch.arange(256, dtype=torch.uint8).view(element.dtype).float().to(device)
        return torch.tensor(_values(element.exponent_bits, element.mantissa_bits), device=device)


@functools.cache
def _values(exponent_bits: int, mantissa_bits: int) -> tuple[float, ...]:
    """The value of every code of a float without inf and nan."""
    bias = 2 ** (exponent_bits - 1) - 1
    positive = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        positive.append(2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction))
    return tuple(positive + [-value for value in positive])


E4M3 = SmallFloat(4, 3, 448.0, torch.float8_e4m3fn)
E5M2 = SmallFloat(5, 2, 57344.0, torch.float8_e5m2)
E3M2 = SmallFloat(3, 2, 28.0)
E2M3 = SmallFloat(2, 3, 7.5)
E2M1 = SmallFloat(2, 1, 6.0)
