"""Tensors inside what a module takes and returns: tuples, lists, dicts, named tuples and dataclasses of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["cast_floats", "map_tensors", "with_grad"]


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with fn applied to every tensor; containers that do not change are returned as they are."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        return _rebuilt_dict(value, {key: map_tensors(fn, item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        items = [map_tensors(fn, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _rebuilt_dataclass(fn, value)
    return value


def with_grad(value: Any) -> list[torch.Tensor]:
    """The tensors in `value` that require a gradient, in the order of `map_tensors`."""
    found: list[torch.Tensor] = []
    _add_with_grad(value, found)
    return found


def _add_with_grad(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            found.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _add_with_grad(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add_with_grad(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            _add_with_grad(getattr(value, each.name, None), found)


def cast_floats(dtype: torch.dtype, value: Any) -> Any:
    """`value` with every floating-point tensor in `dtype`."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def _rebuilt_dict(old: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    if all(items[key] is old[key] for key in items):
        return old
    new = old.copy()
    for key, item in items.items():
        new[key] = item
    return new


def _rebuilt_dataclass(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    changed = {}
    for each in dataclasses.fields(value):
        old = getattr(value, each.name, None)  # a field with init=False may not be set yet
        new = map_tensors(fn, old)
        if new is not old:
            changed[each.name] = new
    if not changed:
        return value
    # Not dataclasses.replace: it runs __post_init__ again and refuses fields with init=False.
    rebuilt = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(rebuilt, name, new)  # frozen ones too
    return rebuilt
