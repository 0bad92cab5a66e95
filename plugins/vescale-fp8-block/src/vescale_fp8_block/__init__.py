"""FP8 block formats for vescale-fsdp.

Reading order: fp8.
"""

from __future__ import annotations

from collections.abc import Iterable

from vescale_fsdp import BlockFormat, hookimpl

from .fp8 import FP8_FORMATS, Fp8Block

__all__ = ["FP8_FORMATS", "Fp8Block", "vescale_block_formats"]


@hookimpl
def vescale_block_formats() -> Iterable[BlockFormat]:
    return FP8_FORMATS.values()
