"""A model's shapes as JSON, version 1; `count` copies of a group are numbered on from the first number in their names.

{"version": 1, "model": "tiny", "parameters": 8256, "groups": [
  {"count": 1, "params": [["embed.weight", [128, 32]]]},
  {"count": 2, "params": [["layers.0.w1", [64, 32]], ["layers.0.bias", [32]]]}
]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count as count_from
from pathlib import Path
from typing import Any

from ..spec import ParamSpec
from .checks import brief, is_int, refuse_duplicates, shape_of
from .values import ROOT, ModelShapes, ShapeError, ShapeGroup, merge_equal

__all__ = ["VERSION", "from_json", "to_json"]

VERSION = 1

MAX_COUNT = 100_000
"""Copies of one group; more is a slip of the pen."""

DTYPE = "bfloat16"
"""The format has shapes only; this is the dtype that its parameters get."""


def to_json(shapes: ModelShapes) -> str:
    """The JSON that `read_shapes` reads, one parameter per line; dtypes and granularities are not part of it."""
    groups = []
    for group in shapes.groups:
        params = ",\n".join(f"  {json.dumps([spec.fqn, list(spec.shape)])}" for spec in group.specs)
        groups.append(f' {{"count": {group.count}, "params": [\n{params}\n ]}}')
    head = f'"version": {VERSION}, "model": {json.dumps(shapes.model)}, "parameters": {shapes.numel}'
    return f'{{{head}, "groups": [\n' + ",\n".join(groups) + "\n]}\n"


def from_json(path: Path, value: Mapping[str, Any]) -> ModelShapes:
    """The model in the JSON object `value`, which was read from `path`."""
    if not is_int(value.get("version")) or value["version"] != VERSION:
        raise ShapeError(f"{path}: version: expected {VERSION}, got {brief(value.get('version'))}")
    groups = value.get("groups")
    if not isinstance(groups, list) or not groups:
        raise ShapeError(f"{path}: groups: expected a list of {{count, params}}, got {brief(groups)}")
    read = [_json_group(f"{path}: groups[{index}]", group) for index, group in enumerate(groups)]
    refuse_duplicates(str(path), [spec.fqn for _, specs in read for spec in specs])
    shapes = ModelShapes(str(value.get("model") or path.stem), str(path), _with_copies(read))
    if "parameters" in value and value["parameters"] != shapes.numel:
        raise ShapeError(
            f"{path}: parameters: expected {shapes.numel}, the elements of all groups, got "
            f"{brief(value['parameters'])}. Correct or remove the entry"
        )
    return shapes


def _json_group(where: str, value: object) -> tuple[int, list[ParamSpec]]:
    if not isinstance(value, dict):
        raise ShapeError(f"{where}: expected {{count, params}}, got {brief(value)}")
    copies = value.get("count", 1)
    if not is_int(copies) or not 1 <= copies <= MAX_COUNT:
        raise ShapeError(f"{where}.count: expected a whole number from 1 to {MAX_COUNT}, got {brief(copies)}")
    params = value.get("params")
    if not isinstance(params, list) or not params:
        raise ShapeError(f"{where}.params: expected a list of [fqn, shape], got {brief(params)}")
    return copies, [_json_param(f"{where}.params[{index}]", param) for index, param in enumerate(params)]


def _json_param(where: str, value: object) -> ParamSpec:
    if not isinstance(value, list) or len(value) != 2:
        raise ShapeError(f"{where}: expected [fqn, shape], got {brief(value)}")
    fqn, shape = value
    if not isinstance(fqn, str) or not fqn:
        raise ShapeError(f"{where}: expected the parameter's name, got {brief(fqn)}")
    return ParamSpec(fqn, shape_of(f"{where} ({fqn})", shape), DTYPE)


def _with_copies(read: Sequence[tuple[int, list[ParamSpec]]]) -> tuple[ShapeGroup, ...]:
    """Number each group's copies on from its first, leaving out the numbers that other groups start with."""
    firsts = [_common_block([spec.fqn for spec in specs]) for _, specs in read]
    taken = {first for first in firsts if first}
    groups = []
    for index, ((copies, specs), first) in enumerate(zip(read, firsts, strict=True)):
        name = first or (ROOT if copies == 1 and ROOT not in taken else f"group{index}")
        taken.add(name)
        container, _, number = first.rpartition(".") if first else (name, "", "1")
        prefixes = [name]
        numbers = count_from(int(number) + 1)
        while len(prefixes) < copies:
            prefix = f"{container}.{next(numbers)}".removeprefix(".")
            if prefix not in taken:
                taken.add(prefix)
                prefixes.append(prefix)
        groups.append(ShapeGroup(tuple(prefixes), tuple(specs)))
    return merge_equal(groups)


def _common_block(fqns: Sequence[str]) -> str:
    """`layers.0` when every name starts with it, else nothing."""
    paths = [fqn.split(".")[:-1] for fqn in fqns]
    for depth, parts in enumerate(zip(*paths, strict=False), 1):
        if len(set(parts)) > 1:
            return ""
        if parts[0].isdigit():
            return ".".join(paths[0][:depth])
    return ""
