"""Shapes from the headers of safetensors files: no weight is read, and the safetensors package is not needed.

A file starts with the length of its JSON header (8 bytes, little endian) and the header, {name: {dtype, shape,
data_offsets}}; an index is JSON too, {"weight_map": {name: file beside the index}}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..spec import ParamSpec, itemsize_bits
from .checks import brief, shape_of, unique_keys
from .values import ModelShapes, ShapeError, group_by_block

__all__ = ["checkpoint_in", "from_file", "from_index"]

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


def from_file(path: Path) -> ModelShapes:
    """One file; its name is the model's."""
    return _from_tensors(str(path), path.stem, _read_header(path))


def checkpoint_in(folder: Path) -> Path:
    """The index in a checkpoint's folder, or its only file."""
    for name in ("model.safetensors.index.json", "model.safetensors"):
        if (folder / name).is_file():
            return folder / name
    raise ShapeError(f"{folder}: holds neither model.safetensors.index.json nor model.safetensors")


def from_index(path: Path, value: Mapping[str, Any]) -> ModelShapes:
    """All files that the index `value`, read from `path`, names; the model is called after their folder."""
    weight_map = value["weight_map"]
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ShapeError(f"{path}: weight_map: expected {{fqn: file}}, got {brief(weight_map)}")
    headers: dict[str, dict[str, ParamSpec]] = {}
    for fqn, name in weight_map.items():
        if name not in headers:
            if not (path.parent / name).is_file():
                raise ShapeError(f"{path}: weight_map[{fqn!r}]: no file {name} beside the index")
            headers[name] = _read_header(path.parent / name)
        if fqn not in headers[name]:
            raise ShapeError(f"{path}: weight_map[{fqn!r}]: {name} holds no such tensor")
    return _from_tensors(str(path), path.resolve().parent.name, {fqn: headers[f][fqn] for fqn, f in weight_map.items()})


def _from_tensors(source: str, model: str, specs: Mapping[str, ParamSpec]) -> ModelShapes:
    ordered = sorted(specs.values(), key=lambda spec: _natural(spec.fqn))
    return ModelShapes(model, source, group_by_block(ordered))


def _read_header(path: Path) -> dict[str, ParamSpec]:
    if not path.is_file():
        raise ShapeError(f"{path}: no such file")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ShapeError(f"{path}: header: truncated; it needs {8 + length} bytes, the file has {size}")
        try:
            header = json.loads(file.read(length), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError, and unique_keys
            raise ShapeError(f"{path}: header: not a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise ShapeError(f"{path}: header: expected {{name: entry}}, got {brief(header)}")
    header.pop("__metadata__", None)
    return {fqn: _header_entry(f"{path}: {fqn}", fqn, entry, size - 8 - length) for fqn, entry in header.items()}


def _header_entry(where: str, fqn: str, entry: object, room: int) -> ParamSpec:
    if not fqn:
        raise ShapeError(f"{where}expected the tensor's name, got ''")
    missing = [key for key in ("dtype", "shape", "data_offsets") if not isinstance(entry, dict) or key not in entry]
    if missing or not isinstance(entry, dict):
        raise ShapeError(f"{where}: no {' or '.join(missing)}, got {brief(entry)}")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise ShapeError(f"{where}: dtype: unknown {brief(entry['dtype'])}, expected one of {sorted(_DTYPES)}")
    dtype = _DTYPES[entry["dtype"]]
    shape = shape_of(where, entry["shape"])
    match entry["data_offsets"]:
        case [int(begin), int(end)]:
            nbytes = -(-math.prod(shape) * itemsize_bits(dtype) // 8)
            if end - begin != nbytes or begin < 0:
                raise ShapeError(f"{where}: data_offsets: {shape} of {dtype} are {nbytes} bytes, got {begin} to {end}")
            if end > room:
                raise ShapeError(f"{where}: truncated; the tensor ends at byte {end} of the data, the file has {room}")
        case other:
            raise ShapeError(f"{where}: data_offsets: expected [begin, end], got {brief(other)}")
    return ParamSpec(fqn, shape, dtype)


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
