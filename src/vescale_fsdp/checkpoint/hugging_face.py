"""Hugging Face's layout: safetensors files with an index, written and read a tensor at a time.

    model-00001-of-00002.safetensors   model-00002-of-00002.safetensors   model.safetensors.index.json

or `model.safetensors` alone. Tied parameters are stored once; the header's metadata has {second name: first name}, as
safetensors' own save_model writes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from .contents import aliases_of
from .errors import CheckpointError, on_rank_0, together
from .safetensor_file import Entry, TensorFile, begin_file, bytes_of

__all__ = ["export_safetensors", "import_safetensors"]

INDEX = "model.safetensors.index.json"
SHARD_NBYTES = 5 * 10**9
MAX_NAMED = 10


@torch.no_grad()
def export_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_nbytes: int = SHARD_NBYTES,
    rename: Callable[[str], str] = str,
) -> None:
    """Write the whole model's state dict as safetensors; every rank calls it, rank 0 writes.

    One tensor at a time is gathered and written, so that no rank holds two whole ones.

    dtype: of floating-point tensors in the files; None keeps their own.
    shard_nbytes: of a file at most, unless one tensor is larger.
    rename: the name in the files of an fqn.
    """
    values = {fqn: value for fqn, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    aliases = aliases_of(model)
    for fqn in aliases:
        values.pop(fqn, None)
    entries = together(lambda: [_entry(rename(fqn), value, dtype) for fqn, value in values.items()])[0]
    parts = _split(entries, shard_nbytes)
    metadata = {"format": "pt", **{rename(fqn): rename(first) for fqn, first in aliases.items()}}
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    writer = _Writer(Path(folder), parts, metadata) if is_writer else None
    for value, entry in zip(values.values(), entries, strict=True):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if writer is not None:
            writer.write(whole.to(entry.dtype).cpu())
        del whole
    on_rank_0(lambda: writer.publish() if writer is not None else None)


def _entry(name: str, value: torch.Tensor, dtype: torch.dtype | None) -> Entry:
    return Entry(name, tuple(value.shape), dtype if dtype is not None and value.is_floating_point() else value.dtype)


def _split(entries: Sequence[Entry], shard_nbytes: int) -> list[list[Entry]]:
    parts: list[list[Entry]] = [[]]
    nbytes = 0
    for entry in entries:
        if parts[-1] and nbytes + entry.nbytes > shard_nbytes:
            parts.append([])
            nbytes = 0
        parts[-1].append(entry)
        nbytes += entry.nbytes
    return parts


class _Writer:
    """Rank 0's files, written aside and renamed at the end. An error waits for `publish`: the others still gather."""

    def __init__(self, folder: Path, parts: Sequence[Sequence[Entry]], metadata: Mapping[str, str]) -> None:
        self._folder = folder
        self._parts = parts
        self._metadata = metadata
        self._names = (
            ["model.safetensors"]
            if len(parts) == 1
            else [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
        )
        self._left = [len(part) for part in parts]
        self._part = -1
        self._file: BinaryIO | None = None
        self._error: OSError | None = None

    def write(self, tensor: torch.Tensor) -> None:
        """The next tensor, in the order of the parts."""
        if self._error is None:
            try:
                if self._file is None:
                    self._open_next()
                assert self._file is not None
                self._file.write(bytes_of(tensor))
                self._left[self._part] -= 1
                if not self._left[self._part]:
                    self._close()
            except OSError as error:
                self._error = error

    def _open_next(self) -> None:
        self._part += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = self._aside(self._names[self._part]).open("wb")
        begin_file(self._file, self._parts[self._part], self._metadata)

    def _close(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None

    def _aside(self, name: str) -> Path:
        return self._folder / f"{name}.new"

    def publish(self) -> None:
        if self._error is not None:
            raise CheckpointError(f"{self._folder}: not exported: {self._error}") from self._error
        for name in self._names:
            self._aside(name).replace(self._folder / name)
        index = self._folder / INDEX
        if len(self._names) == 1:
            index.unlink(missing_ok=True)
            return
        weight_map = {entry.name: name for part, name in zip(self._parts, self._names, strict=True) for entry in part}
        total = sum(entry.nbytes for part in self._parts for entry in part)
        self._aside(INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        )
        self._aside(INDEX).replace(index)


@torch.no_grad()
def import_safetensors(model: nn.Module, folder: str | os.PathLike[str], *, rename: Callable[[str], str] = str) -> None:
    """Load safetensors into the shards; every rank calls it, and reads the parts that it owns and nothing else.

    rename: the name in the files of an fqn. Values are cast to the model's dtypes.

    Raises CheckpointError, on all ranks alike and before anything changes, with the names that are missing, too many,
    or of another shape; tied names may be missing where one of them is there.
    """
    values = {fqn: value for fqn, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    aliases = aliases_of(model)
    paths = on_rank_0(lambda: _files_in(Path(folder)))
    with ExitStack() as stack:
        files = together_open(stack, paths)
        where = {name: file for file in files for name in file.entries}
        plan = _resolve(values, aliases, where, rename)
        together(lambda: _check(values, plan, where, set(map(rename, aliases))))
        for fqn, name in plan.items():
            _fill(fqn, values[fqn], where[name].tensor(name))


def together_open(stack: ExitStack, paths: Sequence[Path]) -> list[TensorFile]:
    files: list[TensorFile] = []
    together(lambda: files.extend(stack.enter_context(TensorFile(path)) for path in paths))
    return files


def _files_in(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        paths = [folder / "model.safetensors"]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; expected {INDEX} with its files, or model.safetensors")
    return paths


def _resolve(
    values: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    where: Mapping[str, TensorFile],
    rename: Callable[[str], str],
) -> dict[str, str]:
    """Which name in the files each tensor has: its own, or that of one it is tied to."""
    plan = {}
    for fqn in values:
        if fqn in aliases:
            continue
        tied = [alias for alias, first in aliases.items() if first == fqn]
        names = [rename(each) for each in (fqn, *tied)]
        plan[fqn] = next((name for name in names if name in where), names[0])
    return plan


def _check(
    values: Mapping[str, torch.Tensor], plan: Mapping[str, str], where: Mapping[str, TensorFile], tied: set[str]
) -> None:
    lines = []
    for fqn, name in plan.items():
        shape = tuple(values[fqn].shape)
        if name not in where:
            lines.append(f"{fqn}: no tensor {name} in the files")
        elif where[name].entries[name].shape != shape:
            lines.append(f"{fqn}: expected shape {shape}, the file has {where[name].entries[name].shape}")
        elif values[fqn].is_meta:
            lines.append(f"{fqn}: is on the meta device; call to_empty(device=...) first")
    lines += [f"{name}: in the files, not in the model" for name in where if name not in {*plan.values(), *tied}]
    if lines:
        more = [f"and {len(lines) - MAX_NAMED} more"] if len(lines) > MAX_NAMED else []
        raise CheckpointError("\n".join(["the files do not fit the model:", *lines[:MAX_NAMED], *more]))


def _fill(fqn: str, value: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's boxes of `whole`, a view of a file, into its shard."""
    if not isinstance(value, DTensor):
        value.detach().copy_(whole)
        return
    for chunk in _chunks(value):
        index = MetadataIndex(fqn, chunk.offsets)
        local: torch.Tensor = value.__get_tensor_shard__(index)  # type: ignore[no-untyped-call]
        slices = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
        local.detach().copy_(whole[slices])


def _chunks(value: DTensor) -> Iterator[Any]:
    yield from value.__create_chunk_list__()  # type: ignore[no-untyped-call]
