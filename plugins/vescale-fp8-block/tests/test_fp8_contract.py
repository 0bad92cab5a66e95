"""Every FP8 format fulfils the contract of block formats."""

from __future__ import annotations

from typing import ClassVar

from vescale_fp8_block import FP8_FORMATS

from vescale_fsdp.testing import BlockFormatContract

# Half a step at the largest code: 16 of 448, 4096 of 57344; with power-of-two scales the largest magnitude may lie
# anywhere in the last binade, so half a step at its lower end.
ERROR = {
    "": 16 / 448,
    "_pow2": 1 / 16,
    "_e5m2": 4096 / 57344,
    "_e5m2_pow2": 1 / 8,
}


class TestFp8(BlockFormatContract):
    formats = tuple(FP8_FORMATS.values())
    largest_error: ClassVar = {
        f"{shape}{suffix}": error for shape in ("fp8_block", "fp8_row") for suffix, error in ERROR.items()
    }


def test_the_bounds_cover_every_format() -> None:
    assert TestFp8.largest_error.keys() == FP8_FORMATS.keys()
