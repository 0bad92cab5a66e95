"""Tensors in a block format, as safetensors files hold them: codes and, beside them, scales.

    layers.0.weight              F8_E4M3   (n, k)
    layers.0.weight_scale_inv    F32       (ceil(n / 128), ceil(k / 128))      value = code * scale, as DeepSeek-V3's

    layers.0.weight_packed       U8        (n, k / 2)           two codes in a byte, as compressed-tensors' MXFP4
    layers.0.weight_scale        U8        (n, k / 32)

    experts.up_proj_blocks       U8        (e, n, k / 32, 16)   a stack of matrices, as gpt-oss's
    experts.up_proj_scales       U8        (e, n, k / 32)

A format says under which dtype and names its parts are found; formats that do not are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
    """A block format of 8-bit or 4-bit codes that files can hold.

    file_dtype: of the codes in a file: one byte each, or uint8 of two. None if no file holds the format.
    scale_suffix: what follows the tensor's name in the scales'.

    Formats may also have `codes_suffix`, which follows it in the codes' ("" if they have none), and `stack_suffixes`,
    both suffixes for stacks of matrices (3 dims), whose codes then lie block by block in a dim of their own.
    """

    @property
    def file_dtype(self) -> torch.dtype | None: ...
    @property
    def scale_suffix(self) -> str: ...


def file_format(name: str) -> FileFormat:
    """The registered format of that name; CheckpointError if it does not say how files hold it."""
    format = registry().format(name)
    if not isinstance(format, FileFormat) or format.file_dtype is None:
        raise CheckpointError(
            f"{name}: has no file_dtype and scale_suffix, so that safetensors files cannot hold it. "
            f"Export these parameters in their own dtype: let param_policy give no format for them."
        )
    return format


@dataclass(frozen=True)
class Quantised:
    """A tensor of `shape` that a file holds as codes and scales, under `name` and what its format adds to it."""

    name: str
    shape: tuple[int, ...]
    format: FileFormat
    is_stack: bool
    """Whether the names and shapes are those of the format's stacks."""

    @classmethod
    def exported(cls, name: str, shape: tuple[int, ...], format: FileFormat) -> Quantised:
        """CheckpointError if no file holds such a tensor in that format."""
        found = next(_ways(name, shape, format), None)
        if found is None:
            raise CheckpointError(
                f"{name}: {format.name} of shape {shape} has no form in files, where each row is whole blocks of "
                f"{format.block_shape[-1]} in up to 3 dims. Let param_policy give no format for it."
            )
        return found

    @property
    def codes_name(self) -> str:
        return self.name + self._suffixes[0]

    @property
    def scale_name(self) -> str:
        return self.name + self._suffixes[1]

    @property
    def _suffixes(self) -> tuple[str, str]:
        if self.is_stack:
            return _stack_suffixes(self.format)
        return getattr(self.format, "codes_suffix", ""), self.format.scale_suffix

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """One element for each byte of codes."""
        if self.format.bits == 8:
            return self.shape
        *before, width = self.shape
        block = self.format.block_shape[-1]
        return (*before, width // block, block // 2) if self.is_stack else (*before, width // 2)

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
        assert self.format.file_dtype is not None
        return (
            Entry(self.codes_name, self.codes_shape, self.format.file_dtype),
            Entry(self.scale_name, self.scale_shape, self.format.scale_dtype),
        )

    def encode(self, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales as the file holds them."""
        codes = torch.empty(math.prod(self.codes_shape), dtype=torch.uint8)
        scales = torch.empty(self._tiling.num_blocks, dtype=self.format.scale_dtype)
        encode_into(self.format, whole.flatten(), self.shape, codes, scales)
        return codes.view(self.entries[0].dtype).view(self.codes_shape), scales.view(self.scale_shape)

    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, begin: int, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, int]:
        """The flat elements [begin, end) and what of their blocks lies around them, and where that starts."""
        unit, numel, bits = self._tiling.granularity, math.prod(self.shape), self.format.bits
        begin, end = begin // unit * unit, min(-(-end // unit) * unit, numel)
        piece = torch.empty(end - begin, dtype=dtype)
        first, last = self._tiling.count(begin), self._tiling.count(end)
        flat_codes = codes.flatten().view(torch.uint8)[begin * bits // 8 : end * bits // 8]
        flat_scales = scales.flatten().view(self.format.scale_dtype)[first:last]
        decode_into(self.format, flat_codes, flat_scales, self.shape, piece)
        return piece, begin

    @property
    def _tiling(self) -> Tiling:
        return Tiling(self.format.block_shape, self.shape)


def find_quantised(name: str, shape: tuple[int, ...], entries: Mapping[str, Entry]) -> Quantised | None:
    """The format that files hold a tensor in, told by names, dtypes and shapes of its parts; None if it is in none."""
    fitting: dict[tuple[int, ...], Quantised] = {}
    for named in registry().formats.values():
        format = named.value
        if isinstance(format, FileFormat) and format.file_dtype is not None:
            for found in _ways(name, shape, format):
                if all(_same(entries.get(part.name), part) for part in found.entries):
                    fitting.setdefault(format.block_shape, found)
    if len(fitting) > 1:
        raise CheckpointError(f"{name}: its scales fit blocks of {_listed(list(fitting))} alike")
    return next(iter(fitting.values()), None)


def _ways(name: str, shape: tuple[int, ...], format: FileFormat) -> Iterator[Quantised]:
    """The ways in which files hold such a tensor; the first is ours."""
    packed = format.bits < 8
    if packed and (not shape or len(shape) > 3 or format.block_shape[0] != 1 or shape[-1] % format.block_shape[-1]):
        return
    if len(shape) == 3 and packed and any(_stack_suffixes(format)):
        yield Quantised(name, shape, format, is_stack=True)
    yield Quantised(name, shape, format, is_stack=False)


def _stack_suffixes(format: FileFormat) -> tuple[str, str]:
    codes, scales = getattr(format, "stack_suffixes", ("", ""))
    return codes, scales


def _same(found: Entry | None, expected: Entry) -> bool:
    """E8M0 scales are uint8 in most files, and have a dtype of their own in some."""
    if found is None or found.shape != expected.shape:
        return False
    is_exponent = found.dtype == torch.float8_e8m0fnu and expected.dtype == torch.uint8
    return found.dtype == expected.dtype or is_exponent


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join("x".join(map(str, shape)) for shape in shapes)
