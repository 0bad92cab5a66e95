"""A model's shapes as JSON, version 1.

    {"version": 1, "model": "tiny", "parameters": 8256, "groups": [
      {"count": 1, "params": [["embed.weight", [128, 32]]]},
      {"count": 2, "params": [["layers.0.w1", [64, 32]], ["layers.0.bias", [32]]]}
    ]}

A group's copies are numbered on from the first number in its names, here `layers.1`; numbers that other groups start
with are left out, and `"step": 2` takes every second one. `model`, `parameters`, `count` and `step` may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    entries = [entry for group in shapes.groups for entry in _entries(group)]
    head = f'"version": {VERSION}, "model": {json.dumps(shapes.model)}, "parameters": {shapes.numel}'
    return f'{{{head}, "groups": [\n' + ",\n".join(entries) + "\n]}\n"


def _entries(group: ShapeGroup) -> Iterator[str]:
    """One entry for copies at equal steps, several where the steps differ."""
    last = [prefix.rpartition(".")[2] for prefix in group.prefixes]
    numbers = [int(part) if part.isdigit() else at for at, part in enumerate(last)]
    copies = list(group.copies())
    at = 0
    while at < len(numbers):
        step = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 1
        end = at + 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        params = ",\n".join(f"  {json.dumps([spec.fqn, list(spec.shape)])}" for spec in copies[at].specs)
        stride = f'"step": {step}, ' if step != 1 else ""
        yield f' {{"count": {end - at}, {stride}"params": [\n{params}\n ]}}'
        at = end


def from_json(path: Path, value: Mapping[str, Any]) -> ModelShapes:
    """The model in the JSON object `value`, which was read from `path`."""
    if not is_int(value.get("version")) or value["version"] != VERSION:
        raise ShapeError(f"{path}: version: expected {VERSION}, got {brief(value.get('version'))}")
    groups = value.get("groups")
    if not isinstance(groups, list) or not groups:
        raise ShapeError(f"{path}: groups: expected a list of {{count, params}}, got {brief(groups)}")
    read = [_json_group(f"{path}: groups[{index}]", group) for index, group in enumerate(groups)]
    refuse_duplicates(str(path), [spec.fqn for entry in read for spec in entry.specs])
    shapes = ModelShapes(str(value.get("model") or path.stem), str(path), _with_copies(read))
    if "parameters" in value and value["parameters"] != shapes.numel:
        raise ShapeError(
            f"{path}: parameters: expected {shapes.numel}, the elements of all groups, got "
            f"{brief(value['parameters'])}. Correct or remove the entry"
        )
    return shapes


@dataclass(frozen=True)
class _Entry:
    """One group as it is written: its first copy, and how many there are."""

    copies: int
    step: int
    specs: tuple[ParamSpec, ...]


def _json_group(where: str, value: object) -> _Entry:
    if not isinstance(value, dict):
        raise ShapeError(f"{where}: expected {{count, params}}, got {brief(value)}")
    copies, step = value.get("count", 1), value.get("step", 1)
    for name, number in (("count", copies), ("step", step)):
        if not is_int(number) or not 1 <= number <= MAX_COUNT:
            raise ShapeError(f"{where}.{name}: expected a whole number from 1 to {MAX_COUNT}, got {brief(number)}")
    params = value.get("params")
    if not isinstance(params, list) or not params:
        raise ShapeError(f"{where}.params: expected a list of [fqn, shape], got {brief(params)}")
    specs = tuple(_json_param(f"{where}.params[{index}]", param) for index, param in enumerate(params))
    return _Entry(copies, step, specs)


def _json_param(where: str, value: object) -> ParamSpec:
    if not isinstance(value, list) or len(value) != 2:
        raise ShapeError(f"{where}: expected [fqn, shape], got {brief(value)}")
    fqn, shape = value
    if not isinstance(fqn, str) or not fqn:
        raise ShapeError(f"{where}: expected the parameter's name, got {brief(fqn)}")
    return ParamSpec(fqn, shape_of(f"{where} ({fqn})", shape), DTYPE)


def _with_copies(entries: Sequence[_Entry]) -> tuple[ShapeGroup, ...]:
    """Number each group's copies on from its first. Groups that start with the same block share its numbers."""
    firsts = [_common_block([spec.fqn for spec in entry.specs]) for entry in entries]
    owner = {first: first for first in firsts if first}
    groups = []
    for index, (entry, first) in enumerate(zip(entries, firsts, strict=True)):
        if not first:
            first = ROOT if entry.copies == 1 and ROOT not in owner else f"group{index}"
            owner[first] = first
        groups.append(ShapeGroup(_prefixes(first, entry, owner), entry.specs))
    return merge_equal(groups)


def _prefixes(first: str, entry: _Entry, owner: dict[str, str]) -> tuple[str, ...]:
    container, _, number = first.rpartition(".") if first[-1].isdigit() and "." in first else (first, "", "0")
    found = [first]
    numbers = count_from(int(number) + entry.step, entry.step)
    while len(found) < entry.copies:
        prefix = f"{container}.{next(numbers)}"
        if owner.setdefault(prefix, first) == first:
            found.append(prefix)
    return tuple(found)


def _common_block(fqns: Sequence[str]) -> str:
    """`layers.0` when every name starts with it, else nothing."""
    paths = [fqn.split(".")[:-1] for fqn in fqns]
    for depth, parts in enumerate(zip(*paths, strict=False), 1):
        if len(set(parts)) > 1:
            return ""
        if parts[0].isdigit():
            return ".".join(paths[0][:depth])
    return ""
