"""Every MX format fulfils the contract of block formats."""

from __future__ import annotations

from typing import ClassVar

from vescale_mx import MX_FORMATS

from vescale_fsdp.testing import BlockFormatContract


class TestMx(BlockFormatContract):
    formats = tuple(MX_FORMATS.values())
    # The largest magnitude m lies in the element's last binade: what exceeds the largest code saturates (448 of 512,
    # 7.5 of 8, 28 of 32, 6 of 8), the rest is off by half a step at most.
    largest_error: ClassVar = {
        "mxfp8": 1 / 8,
        "mxfp8_e5m2": 1 / 8,
        "mxfp6_e2m3": 1 / 16,
        "mxfp6_e3m2": 1 / 8,
        "mxfp4": 1 / 4,
    }
