"""OCP microscaling formats for vescale-fsdp.

Reading order: small_float, mx.
"""

from __future__ import annotations

from collections.abc import Iterable

from vescale_fsdp import BlockFormat, hookimpl

from .mx import MX_FORMATS, MxFormat
from .small_float import SmallFloat

__all__ = ["MX_FORMATS", "MxFormat", "SmallFloat", "vescale_block_formats"]


@hookimpl
def vescale_block_formats() -> Iterable[BlockFormat]:
    return MX_FORMATS.values()
