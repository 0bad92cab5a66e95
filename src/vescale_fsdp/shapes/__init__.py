"""The shapes of a model, wherever they come from: JSON, safetensors headers, a module on the meta device.

Reading order: values, checks, model_json, safetensors, modules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..spec import itemsize_bits
from .checks import load_json
from .model_json import from_json, to_json
from .modules import build, from_factory, from_module
from .safetensors import checkpoint_in, from_file, from_index
from .values import ModelShapes, ShapeError, ShapeGroup, group_by_block, merge_equal

__all__ = [
    "ModelShapes",
    "ShapeError",
    "ShapeGroup",
    "build",
    "from_module",
    "group_by_block",
    "merge_equal",
    "read_shapes",
    "to_json",
]


def read_shapes(source: str, *, dtype: str | None = None, group_by: Sequence[str] = ()) -> ModelShapes:
    """Shapes of a model's JSON, a safetensors file, its index or folder, or a `package.module:factory`.

    `dtype` overrides what the source says; `group_by` patterns override its groups (see `group_by_block`).
    """
    shapes = _read(source)
    if group_by:
        shapes = shapes.with_groups(group_by_block(tuple(shapes.specs), group_by))
    if dtype is not None:
        itemsize_bits(dtype)
        shapes = shapes.with_dtype(dtype)
    return shapes.split_dtypes()


def _read(source: str) -> ModelShapes:
    path = Path(source)
    if path.is_dir():
        path = checkpoint_in(path)
    if path.suffix == ".safetensors":
        return from_file(path)
    if path.is_file() or path.suffix == ".json":
        value = load_json(path)
        return from_index(path, value) if "weight_map" in value else from_json(path, value)
    if re.fullmatch(r"[\w.]+:[\w.]+", source):
        return from_factory(source)
    raise ShapeError(
        f"{source}: no such file. Expected a model's JSON, a .safetensors file, index or folder, or module:factory"
    )
