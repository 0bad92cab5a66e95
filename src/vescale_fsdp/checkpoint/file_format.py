"""Tensors in a block format, as safetensors files hold them: codes under the tensor's name, scales beside them.

    layers.0.weight              F8_E4M3   (n, k)
    layers.0.weight_scale_inv    F32       (ceil(n / 128), ceil(k / 128))      value = code * scale, as DeepSeek-V3's

A format says under which dtype and name its parts are found; formats that do not are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ..formats.block_format import BlockFormat, decode_into, encode_into
from ..formats.tiling import Tiling
from ..plugins import registry
from .errors import CheckpointError
from .safetensor_file import Entry

__all__ = ["FileFormat", "Quantised", "file_format", "find_quantised"]


@runtime_checkable
class FileFormat(BlockFormat, Protocol):
    """A block format of 8-bit codes that files can hold.

    file_dtype: of the codes in a file, one byte each. scale_suffix: what follows the tensor's name in the scales'.
    """

    @property
    def file_dtype(self) -> torch.dtype: ...
    @property
    def scale_suffix(self) -> str: ...


def file_format(name: str) -> FileFormat:
    """The registered format of that name; CheckpointError if it does not say how files hold it."""
    format = registry().format(name)
    if not isinstance(format, FileFormat) or format.bits != 8:
        raise CheckpointError(
            f"{name}: has no file_dtype and scale_suffix of 8-bit codes, so that safetensors files cannot hold it. "
            f"Export these parameters in their own dtype: let param_policy give no format for them."
        )
    return format


@dataclass(frozen=True)
class Quantised:
    """A tensor of `shape` that a file holds as `name` and the scales beside it."""

    name: str
    shape: tuple[int, ...]
    format: FileFormat

    @property
    def scale_name(self) -> str:
        return self.name + self.format.scale_suffix

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Blocks along each dim."""
        rows_columns = self.format.block_shape
        match self.shape:
            case (*stack, height, width) if len(rows_columns) == 2 and len(stack) < 2:
                return (*stack, -(-height // rows_columns[0]), -(-width // rows_columns[1]))
        return (self._tiling.num_blocks,)

    @property
    def entries(self) -> tuple[Entry, Entry]:
        return (
            Entry(self.name, self.shape, self.format.file_dtype),
            Entry(self.scale_name, self.scale_shape, self.format.scale_dtype),
        )

    def encode(self, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales as the file holds them."""
        codes = torch.empty(whole.numel(), dtype=torch.uint8)
        scales = torch.empty(self._tiling.num_blocks, dtype=self.format.scale_dtype)
        encode_into(self.format, whole.flatten(), self.shape, codes, scales)
        return codes.view(self.format.file_dtype).view(self.shape), scales.view(self.scale_shape)

    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, begin: int, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, int]:
        """The flat elements [begin, end) and what of their blocks lies around them, and where that starts."""
        unit, numel = self._tiling.granularity, math.prod(self.shape)
        begin, end = begin // unit * unit, min(-(-end // unit) * unit, numel)
        piece = torch.empty(end - begin, dtype=dtype)
        first, last = self._tiling.count(begin), self._tiling.count(end)
        flat_codes = codes.flatten().view(torch.uint8)[begin:end]
        decode_into(self.format, flat_codes, scales.flatten()[first:last], self.shape, piece)
        return piece, begin

    @property
    def _tiling(self) -> Tiling:
        return Tiling(self.format.block_shape, self.shape)


def find_quantised(entry: Entry, entries: Mapping[str, Entry]) -> Quantised | None:
    """The format that a file's tensor is in, told by its dtype and by the scales beside it; None if it is in none."""
    fitting: dict[tuple[int, ...], Quantised] = {}
    for named in registry().formats.values():
        format = named.value
        if isinstance(format, FileFormat) and format.bits == 8 and format.file_dtype == entry.dtype:
            found = Quantised(entry.name, entry.shape, format)
            if entries.get(found.scale_name) == found.entries[1]:
                fitting.setdefault(format.block_shape, found)
    if len(fitting) > 1:
        raise CheckpointError(f"{entry.name}: its scales fit blocks of {_listed(list(fitting))} alike")
    return next(iter(fitting.values()), None)


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join("x".join(map(str, shape)) for shape in shapes)
