"""What a parameter is to the planner: its name, shape, dtype, and what may not be cut."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ragged_dtensor.granularity import ELEMENT, Granularity

from .errors import PlanError

__all__ = ["ParamSpec", "alignment", "itemsize_bits"]

ALIGNMENT_BITS = 128
"""Shares and tensor starts are multiples of 16 bytes: what a vectorised copy and NCCL's fast path read at once."""

_BITS = {
    "bool": 8,
    "float32": 32,
    "float64": 64,
    "float16": 16,
    "bfloat16": 16,
    "int8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "uint8": 8,
    "uint16": 16,
    "uint32": 32,
    "uint64": 64,
    "complex32": 32,
    "complex64": 64,
    "complex128": 128,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float6_e2m3fn": 6,
    "float6_e3m2fn": 6,
    "float4_e2m1fn": 4,
    "float4_e2m1fn_x2": 4,  # two elements in a byte; shapes here count elements
    "int4": 4,
    "uint4": 4,
}


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter as its communication group sees it.

    `shape` is the global shape of this group: after tensor or expert parallelism has taken its part. `dtype` is torch's
    name without "torch.", such as "bfloat16".
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    granularity: Granularity = ELEMENT
    numel: int = field(init=False, repr=False, compare=False)
    row: int = field(init=False, repr=False, compare=False)
    """Elements of one row, between which cuts are preferred."""

    def __post_init__(self) -> None:
        if not self.fqn:
            raise PlanError(f"a parameter of shape {self.shape} has no name; give it its fqn")
        if any(size < 0 for size in self.shape):
            raise PlanError(f"{self.fqn}: sizes are >= 0, got shape {self.shape}")
        if self.dtype not in _BITS:
            raise PlanError(f"{self.fqn}: unknown dtype {self.dtype!r}; expected torch's name, one of {sorted(_BITS)}")
        object.__setattr__(self, "numel", math.prod(self.shape))
        object.__setattr__(self, "row", max(math.prod(self.shape[1:]), 1))

    @property
    def nbytes(self) -> int:
        return -(-self.numel * itemsize_bits(self.dtype) // 8)


def itemsize_bits(dtype: str) -> int:
    """Bits of one element; 4 for two elements in a byte."""
    try:
        return _BITS[dtype]
    except KeyError:
        raise PlanError(f"unknown dtype {dtype!r}; expected torch's name, one of {sorted(_BITS)}") from None


def alignment(dtypes: Iterable[str]) -> int:
    """Least number of elements that fills a multiple of 16 bytes in every one of `dtypes`.

    bfloat16 -> 8, float32 with bfloat16 -> 8, float4 -> 32, packed 6-bit floats -> 64 (48 bytes).
    """
    return math.lcm(*(ALIGNMENT_BITS // math.gcd(ALIGNMENT_BITS, itemsize_bits(dtype)) for dtype in dtypes))
