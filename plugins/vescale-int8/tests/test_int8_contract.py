"""Every 8-bit state format fulfils the contract of block formats."""

from __future__ import annotations

from typing import ClassVar

import torch
from vescale_int8 import INT8_FORMATS

from vescale_fsdp.testing import BlockFormatContract

UNSIGNED = tuple(format for name, format in INT8_FORMATS.items() if name.endswith("_unsigned"))
# Half a step: 1 of 254, and of the top decade of the map, 0.9 in 64 or 128 steps.
ERROR = {"int8": 1 / 254, "dynamic8": 0.9 / 128, "unsigned": 0.9 / 256}


class TestSigned(BlockFormatContract):
    formats = tuple(format for format in INT8_FORMATS.values() if format not in UNSIGNED)
    largest_error: ClassVar = {format.name: ERROR[format.name.partition("_")[0]] for format in formats}


class TestUnsigned(BlockFormatContract):
    formats = UNSIGNED
    largest_error: ClassVar = {format.name: ERROR["unsigned"] for format in formats}

    def sample(self, shape: tuple[int, ...]) -> torch.Tensor:
        return super().sample(shape).abs()
