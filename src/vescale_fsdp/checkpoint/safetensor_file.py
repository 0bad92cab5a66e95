"""The safetensors format, tensor by tensor: a file is written while its tensors come, and read without being loaded.

8 bytes       length of the header, little endian
header        {"__metadata__": {str: str}, fqn: {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}, ..}
data          each tensor's elements, contiguous, little endian; offsets count from here
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .errors import CheckpointError

__all__ = ["Entry", "TensorFile", "begin_file", "bytes_of"]

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in CODES:
            raise CheckpointError(f"{self.name}: safetensors has no {self.dtype}; pass dtype= to export another")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def begin_file(file: BinaryIO, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
    """Write the header; the bytes of all `entries`, in order, are to follow."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for entry in entries:
        offsets = [begin, begin + entry.nbytes]
        header[entry.name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        begin += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's elements as bytes, without a copy if it is contiguous."""
    flat: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()  # numpy's stubs know no buffers
    return memoryview(flat)


class TensorFile:
    """A file whose tensors are views of the mapped bytes: only what is read is loaded. Close it by `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            self._start = 8 + int.from_bytes(file.read(8), "little")
            if size < self._start:
                raise CheckpointError(f"{path}: truncated: its header ends at byte {self._start}, the file at {size}")
            try:
                header = json.loads(file.read(self._start - 8))
                self.metadata: dict[str, str] = header.pop("__metadata__", {})
                self.entries = {
                    name: Entry(name, tuple(each["shape"]), DTYPES[each["dtype"]]) for name, each in header.items()
                }
                self._begins = {name: int(each["data_offsets"][0]) for name, each in header.items()}
                ends = {name: int(each["data_offsets"][1]) for name, each in header.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{path}: not a safetensors file: {error!r}") from None
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for name, end in ends.items():
            if end + self._start > size or end - self._begins[name] != self.entries[name].nbytes:
                raise CheckpointError(f"{path}: truncated, or a wrong header: {name} ends at byte {self._start + end}")

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BufferError):  # a view is still alive somewhere; the map goes with it
            self._map.close()

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the file; copy what is to outlive it."""
        entry = self.entries[name]
        numel = math.prod(entry.shape)
        if not numel:
            return torch.empty(entry.shape, dtype=entry.dtype)
        offset = self._start + self._begins[name]
        return torch.frombuffer(self._map, dtype=entry.dtype, count=numel, offset=offset).view(entry.shape)
