"""Errors in place of silence: optimizers with replaced parameters, calls that meet sharded ones, late parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import _torch
from .errors import VescaleError
from .managed import managed_as

__all__ = ["Trap", "refuse_unknown_ignored", "refuse_unmanaged", "watch_optimizers"]

_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, ...]] = weakref.WeakKeyDictionary()
_watching: list[Any] = []


def watch_optimizers() -> None:
    """From now on, a step of an optimizer that was made before `fully_shard` raises instead of changing nothing."""
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_check_step))


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _checked.get(optimizer) == _settings(optimizer):
        return
    stale = [
        fqn
        for group in optimizer.param_groups
        for param in group["params"]
        if (fqn := managed_as(param)) is not None and not isinstance(param, DTensor)
    ]
    if stale:
        raise VescaleError(
            f"{type(optimizer).__name__} holds {len(stale)} parameters that are not the sharded ones, the first "
            f"{stale[0]}: it was made before fully_shard, or while they were unsharded, so it would train nothing. "
            f"Make the optimizer after fully_shard, on model.parameters()."
        )
    for group in optimizer.param_groups:
        if len({isinstance(param, DTensor) for param in group["params"]}) > 1:
            _step_one_by_one(group)
    _checked[optimizer] = _settings(optimizer)


def _settings(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """What a check depends on; loading a state dict brings old settings back."""
    return tuple((len(group["params"]), group.get("foreach"), group.get("fused")) for group in optimizer.param_groups)


def _step_one_by_one(group: dict[str, Any]) -> None:
    """Lists of plain and sharded tensors, as ignored parameters make them, are refused by torch (pytorch#183207)."""
    for setting in ("foreach", "fused"):
        if setting in group:
            group[setting] = False


class Trap:
    """Forward pre-hook of a module inside a wrapped one, in place while its parameters are sharded."""

    def __init__(self, fqns: Sequence[str], wrapped: nn.Module) -> None:
        self._fqns = fqns
        self._wrapped = type(wrapped).__name__

    def __call__(self, module: nn.Module, args: Any) -> NoReturn:
        raise VescaleError(
            f"{type(module).__name__} with {', '.join(self._fqns)} was called outside the forward of {self._wrapped}, "
            f"which fully_shard wraps: its parameters are sharded. Call the wrapped module itself, use "
            f"register_fsdp_forward_method(module, 'name') for another method that leads here, or wrap this module too."
        )


def refuse_unmanaged(root: nn.Module, managed: set[nn.Parameter], ignored: set[nn.Parameter]) -> None:
    """Parameters that were added after `fully_shard` would silently train apart on every rank."""
    late = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in root.named_modules()
        if not _torch.is_replicated_by_torch(module)
        for name, param in module._parameters.items()
        if param is not None and param not in managed and param not in ignored
    ]
    if late:
        raise VescaleError(
            f"no fully_shard call manages {late}: added afterwards, they would be neither sharded nor reduced. Add "
            f"parameters before fully_shard, or pass them in ignored_params."
        )


def refuse_unknown_ignored(root: nn.Module, ignored: Iterable[nn.Parameter]) -> None:
    known = set(root.parameters())
    unknown = [tuple(param.shape) for param in ignored if param not in known]
    if unknown:
        raise VescaleError(
            f"ignored_params holds {len(unknown)} parameters that are not in {type(root).__name__}, of shapes "
            f"{unknown[:5]}. Pass parameters of the model that is wrapped."
        )
