"""Microscaling formats: 32 elements of a row share one power of two. OCP MX specification v1.0, sections 5 and 6.3.

    X = 2 ** (floor(log2(max |block|)) - emax_elem)     stored as E8M0: the exponent plus 127, 255 for nan
    code = element(block / X)                           to nearest, ties to even, saturating

A block of zeros, or of magnitudes below the range, has the least scale 2**-127; a block that holds inf or nan has the
scale nan, so all of it decodes to nan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .small_float import E2M1, E2M3, E3M2, E4M3, E5M2, SmallFloat

__all__ = ["MX_FORMATS", "MxFormat"]

_BIAS = 127
_NAN = 255


@dataclass(frozen=True)
class MxFormat:
    """`element` codes in blocks of 32 along the last dim, with E8M0 scales in uint8."""

    name: str
    element: SmallFloat
    file_dtype: torch.dtype | None = None
    """Of the codes in safetensors files; no program that we know of reads MXFP6 from them."""
    codes_suffix: str = ""
    scale_suffix: str = "_scale"
    """Of the names in safetensors files, as compressed-tensors' `mxfp4-pack-quantized` and `mxfp8-quantized`."""
    stack_suffixes: tuple[str, str] = ("_blocks", "_scales")
    """Of fused experts in MXFP4, as in gpt-oss."""
    block_shape: tuple[int, int] = (1, 32)
    scale_dtype: torch.dtype = torch.uint8

    @property
    def bits(self) -> int:
        return self.element.bits

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        magnitude = blocks.abs().amax(dim=1, keepdim=True)
        finite = magnitude.isfinite()
        exponent = torch.frexp(magnitude).exponent - 1 - self.element.largest_exponent
        biased = torch.where(magnitude > 0, exponent + _BIAS, 0).clamp_(0, 2 * _BIAS)
        codes = self.element.encode(blocks * _powers_of_two(2 * _BIAS - biased))
        return codes, torch.where(finite, biased, _NAN).to(torch.uint8).squeeze(1)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return self.element.decode(codes) * _powers_of_two(scales).unsqueeze(1)


def _powers_of_two(biased: torch.Tensor) -> torch.Tensor:
    """E8M0 to float32: 2 ** (b - 127), and nan for 255."""
    return biased.to(torch.uint8).view(torch.float8_e8m0fnu).float()


MX_FORMATS = {
    format.name: format
    for format in (
        MxFormat("mxfp8", E4M3, torch.float8_e4m3fn),
        MxFormat("mxfp8_e5m2", E5M2, torch.float8_e5m2),
        MxFormat("mxfp6_e2m3", E2M3),
        MxFormat("mxfp6_e3m2", E3M2),
        MxFormat("mxfp4", E2M1, torch.uint8, codes_suffix="_packed"),
    )
}
"""By name. mxfp8 is E4M3, mxfp4 is E2M1."""
