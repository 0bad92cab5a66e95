"""8-bit formats for optimizer state in vescale-fsdp.

Reading order: int8, dynamic, catalog.
"""

from __future__ import annotations

from collections.abc import Iterable

from vescale_fsdp import BlockFormat, hookimpl

from .catalog import INT8_FORMATS
from .dynamic import Dynamic8, dynamic_map
from .int8 import Int8

__all__ = ["INT8_FORMATS", "Dynamic8", "Int8", "dynamic_map", "vescale_block_formats"]


@hookimpl
def vescale_block_formats() -> Iterable[BlockFormat]:
    return INT8_FORMATS.values()
