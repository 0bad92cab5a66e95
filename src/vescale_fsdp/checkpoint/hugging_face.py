"""Hugging Face's layout: safetensors files with an index, written and read a tensor at a time.

    model-00001-of-00002.safetensors   model-00002-of-00002.safetensors   model.safetensors.index.json

or `model.safetensors` alone. Tied parameters are stored once; the header's metadata has {second name: first name}, as
safetensors' own save_model writes it. Parameters in a block format are codes and scales, see file_format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from operator import mul
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from ..policy import ParamPolicy
from .contents import aliases_of, with_aliases
from .errors import CheckpointError, on_rank_0, together
from .file_format import FileFormat, Quantised, file_format, find_quantised
from .safetensor_file import Entry, TensorFile, begin_file, bytes_of

__all__ = ["export_safetensors", "import_safetensors"]

INDEX = "model.safetensors.index.json"
SHARD_NBYTES = 5 * 10**9
MAX_NAMED = 10
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
"""Dtypes that hold no values without scales, unless the model's own are of the same dtype."""


@torch.no_grad()
def export_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_nbytes: int = SHARD_NBYTES,
    rename: Callable[[str], str] = str,
    param_policy: Callable[[str, Any], ParamPolicy | None] | None = None,
) -> None:
    """Write the whole model's state dict as safetensors; every rank calls it, rank 0 writes.

    One tensor at a time is gathered and written, so that no rank holds two whole ones.

    dtype: of floating-point tensors in the files; None keeps their own.
    shard_nbytes: of a file at most, unless one tensor is larger.
    rename: the name in the files of an fqn.
    param_policy: as for `fully_shard`; parameters for which it names a format are written in that, with their scales.
    """
    values = {fqn: value for fqn, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    aliases = aliases_of(model)
    for fqn in aliases:
        values.pop(fqn, None)
    formats = together(lambda: _formats(model, param_policy))[0]
    forms = together(lambda: [_form(fqn, value, rename, dtype, formats) for fqn, value in values.items()])[0]
    parts = _split([entry for form in forms for entry in _entries(form)], shard_nbytes)
    metadata = {"format": "pt", **{rename(fqn): rename(first) for fqn, first in aliases.items()}}
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    writer = _Writer(Path(folder), parts, metadata) if is_writer else None
    for value, form in zip(values.values(), forms, strict=True):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if writer is not None:
            for tensor in _in_form(form, whole.cpu()):
                writer.write(tensor)
        del whole
    on_rank_0(lambda: writer.publish() if writer is not None else None)


def _formats(model: nn.Module, param_policy: Callable[[str, Any], ParamPolicy | None] | None) -> dict[str, FileFormat]:
    """The formats that parameters are written in, by fqn."""
    policies = {fqn: param_policy(fqn, param) for fqn, param in model.named_parameters()} if param_policy else {}
    return {fqn: file_format(each.format) for fqn, each in policies.items() if each is not None and each.format}


def _form(
    fqn: str,
    value: torch.Tensor,
    rename: Callable[[str], str],
    dtype: torch.dtype | None,
    formats: Mapping[str, FileFormat],
) -> Entry | Quantised:
    """What the files hold of a tensor."""
    name, shape = rename(fqn), tuple(value.shape)
    if fqn in formats:
        return Quantised.exported(name, shape, formats[fqn])
    return Entry(name, shape, dtype if dtype is not None and value.is_floating_point() else value.dtype)


def _entries(form: Entry | Quantised) -> tuple[Entry, ...]:
    return form.entries if isinstance(form, Quantised) else (form,)


def _in_form(form: Entry | Quantised, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return form.encode(whole) if isinstance(form, Quantised) else (whole.to(form.dtype),)


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
            for name in self._names:
                self._aside(name).unlink(missing_ok=True)
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

    rename: the name in the files of an fqn. Values are cast to the model's dtypes. Codes with scales beside them, of a
    registered format, are decoded: on each rank, the blocks that its part lies in.

    Raises CheckpointError, on all ranks alike and before anything changes, with the names that are missing, too many,
    or of another shape; tied names may be missing where one of them is there.
    """
    values = {fqn: value for fqn, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    aliases = aliases_of(model)
    paths = on_rank_0(lambda: _files_in(Path(folder)))
    with ExitStack() as stack:
        files = together_open(stack, paths)
        where = {name: file for file in files for name in file.entries}
        entries = {name: file.entries[name] for name, file in where.items()}
        quantised = together(lambda: _find_quantised(values, rename, entries))[0]
        plan = _resolve(values, aliases, {*where, *quantised}, rename)
        together(lambda: _check(values, plan, entries, set(map(rename, aliases)), quantised))
        for fqn, name in plan.items():
            found = quantised.get(name)
            if found is None:
                _fill(fqn, values[fqn], where[name].tensor(name))
                continue
            codes, scales = (where[part].tensor(part) for part in (found.codes_name, found.scale_name))
            _fill_decoded(fqn, values[fqn], found, codes, scales)
    # What views no parameter, as the values of shards that are stored as codes, arrives only now.
    model.load_state_dict(with_aliases(model, values), strict=False)


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
    found: Set[str],
    rename: Callable[[str], str],
) -> dict[str, str]:
    """Which name in the files each tensor has: its own, or that of one it is tied to."""
    plan = {}
    for fqn in values:
        if fqn in aliases:
            continue
        tied = [alias for alias, first in aliases.items() if first == fqn]
        names = [rename(each) for each in (fqn, *tied)]
        plan[fqn] = next((name for name in names if name in found), names[0])
    return plan


def _find_quantised(
    values: Mapping[str, torch.Tensor], rename: Callable[[str], str], entries: Mapping[str, Entry]
) -> dict[str, Quantised]:
    shapes = {rename(fqn): tuple(value.shape) for fqn, value in values.items()}
    found = {name: find_quantised(name, shape, entries) for name, shape in shapes.items()}
    return {name: each for name, each in found.items() if each is not None}


def _check(
    values: Mapping[str, torch.Tensor],
    plan: Mapping[str, str],
    entries: Mapping[str, Entry],
    tied: set[str],
    quantised: Mapping[str, Quantised],
) -> None:
    lines = []
    for fqn, name in plan.items():
        shape = tuple(values[fqn].shape)
        if name not in entries and name not in quantised:
            lines.append(f"{fqn}: no tensor {name} in the files")
        elif values[fqn].is_meta:
            lines.append(f"{fqn}: is on the meta device; call to_empty(device=...) first")
        elif name in quantised:
            continue
        elif entries[name].shape != shape:
            lines.append(f"{fqn}: expected shape {shape}, the file has {entries[name].shape}")
        elif entries[name].dtype in CODES and _lacks_scales(values[fqn], entries[name]):
            lines.append(f"{fqn}: the file has codes, {entries[name].dtype}, but no scales of a registered format")
    parts = (part for each in quantised.values() for part in (each.codes_name, each.scale_name))
    known = {*plan.values(), *tied, *parts}
    lines += [f"{name}: in the files, not in the model" for name in entries if name not in known]
    if lines:
        more = [f"and {len(lines) - MAX_NAMED} more"] if len(lines) > MAX_NAMED else []
        raise CheckpointError("\n".join(["the files do not fit the model:", *lines[:MAX_NAMED], *more]))


def _lacks_scales(value: torch.Tensor, entry: Entry) -> bool:
    return value.is_floating_point() and value.dtype != entry.dtype


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


def _fill_decoded(
    fqn: str, value: torch.Tensor, quantised: Quantised, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Decode the blocks that this rank's boxes lie in, and no others where its part is one run of the tensor."""
    numel, shape = value.numel(), tuple(value.shape)
    if not isinstance(value, DTensor):
        piece, _ = quantised.decode(codes, scales, 0, numel, value.dtype)
        value.detach().copy_(piece.view(shape))
        return
    strides = value.stride()
    chunks = [chunk for chunk in _chunks(value) if math.prod(chunk.sizes)]
    if not chunks:
        return
    begins = [sum(map(mul, chunk.offsets, strides)) for chunk in chunks]
    ends = [
        begin + sum((size - 1) * stride for size, stride in zip(chunk.sizes, strides, strict=True)) + 1
        for begin, chunk in zip(begins, chunks, strict=True)
    ]
    piece, first = quantised.decode(codes, scales, min(begins), max(ends), value.dtype)
    for begin, chunk in zip(begins, chunks, strict=True):
        index = MetadataIndex(fqn, chunk.offsets)
        local: torch.Tensor = value.__get_tensor_shard__(index)  # type: ignore[no-untyped-call]
        local.detach().copy_(piece.as_strided(chunk.sizes, strides, begin - first))


def _chunks(value: DTensor) -> Iterator[Any]:
    yield from value.__create_chunk_list__()  # type: ignore[no-untyped-call]
