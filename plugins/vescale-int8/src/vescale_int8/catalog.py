"""The formats of this plugin, by name."""

from __future__ import annotations

from .dynamic import Dynamic8
from .int8 import Int8

__all__ = ["INT8_FORMATS"]

INT8_FORMATS: dict[str, Int8 | Dynamic8] = {
    format.name: format
    for format in (
        Int8("int8_block", (32, 32)),
        Int8("int8_flat", (256,)),
        Dynamic8("dynamic8_block", (32, 32), signed=True),
        Dynamic8("dynamic8_block_unsigned", (32, 32), signed=False),
        Dynamic8("dynamic8_flat", (256,), signed=True),
        Dynamic8("dynamic8_flat_unsigned", (256,), signed=False),
    )
}
"""_block is 32x32, _flat is 256 elements of the flattened tensor; _unsigned is for values that are never negative."""
