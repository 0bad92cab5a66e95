"""Errors in place of silence: optimizers with replaced parameters, calls that meet sharded ones, late parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import _torch
from .errors import VescaleError
from .managed import is_sharded, managed_as

__all__ = ["Census", "Trap", "watch_optimizers"]

_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, ...]] = weakref.WeakKeyDictionary()
_watching: list[Any] = []
_groups: weakref.WeakSet[Any] = weakref.WeakSet()


class Gathered(Protocol):
    """A group of parameters, as far as an optimizer's step is concerned."""

    is_unsharded: bool
    shards: Any

    @property
    def unreduced(self) -> list[str]: ...

    def to_sharded(self) -> None: ...


def watch_optimizers(groups: Iterable[Gathered]) -> None:
    """From now on, steps of optimizers made before `fully_shard` raise, and others free what they make outdated."""
    _groups.update(groups)
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_check_step))


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _refuse_unreduced(optimizer)
    _free_outdated(optimizer)
    if _checked.get(optimizer) == _settings(optimizer):
        return
    stale = [
        fqn
        for group in optimizer.param_groups
        for param in group["params"]
        if (fqn := managed_as(param)) is not None and not is_sharded(param)
    ]
    if stale:
        raise VescaleError(
            f"{type(optimizer).__name__} holds {len(stale)} parameters that are not the sharded ones, the first "
            f"{stale[0]}: it was made before fully_shard, or while they were unsharded, so it would train nothing. "
            f"Make the optimizer after fully_shard, on model.parameters()."
        )
    for group in optimizer.param_groups:
        if _mixes_ours_with_others(group["params"]):
            _step_one_by_one(group)
    _checked[optimizer] = _settings(optimizer)


def _free_outdated(optimizer: torch.optim.Optimizer) -> None:
    """Parameters that are still gathered, after an evaluation for example, would keep the values from before.

    In FSDP2, the next forward runs with those.
    """
    for group in _stepped(optimizer, [group for group in _groups if group.is_unsharded]):
        group.to_sharded()


def _refuse_unreduced(optimizer: torch.optim.Optimizer) -> None:
    """Nobody saw the backward of a forward that returned no tensor: its gradients stay on the gathered parameters."""
    for group in _stepped(optimizer, [group for group in _groups if group.unreduced]):
        raise VescaleError(
            f"gradients of {group.unreduced} were not reduced, and this step would train without them: they come from "
            f"a tensor that no wrapped module returned. Return from forward what the loss is made of."
        )


def _stepped(optimizer: torch.optim.Optimizer, groups: list[Gathered]) -> list[Gathered]:
    """Those of `groups` that the optimizer changes; usually there are none to look at."""
    if not groups:
        return []
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return [group for group in groups if any(id(param) in stepped for param in group.shards.params)]


def _settings(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """What a check depends on; loading a state dict brings old settings back."""
    return tuple((len(group["params"]), group.get("foreach"), group.get("fused")) for group in optimizer.param_groups)


def _mixes_ours_with_others(params: Sequence[Any]) -> bool:
    """Sharded parameters beside plain ones, or on several meshes, as tensor and expert parallelism make them.

    Other people's mixed lists keep torch's behaviour, also after `fully_shard` was called somewhere.
    """
    is_ours = any(isinstance(param, DTensor) and managed_as(cast(nn.Parameter, param)) is not None for param in params)
    return is_ours and len({param.device_mesh if isinstance(param, DTensor) else None for param in params}) > 1


def _step_one_by_one(group: dict[str, Any]) -> None:
    """torch refuses lists of plain and sharded tensors, or of several meshes (pytorch#183207)."""
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


class Census:
    """Every parameter below the root is managed or ignored, and every ignored one is below the root: checked when made.

    `holds` tells cheaply, before each iteration, whether modules or parameters were added, removed or replaced since.
    """

    def __init__(self, root: nn.Module, managed: set[nn.Parameter], ignored: set[nn.Parameter]) -> None:
        _refuse_unmanaged(root, managed, ignored)
        _refuse_unknown_ignored(root, ignored)
        self._params = [module._parameters for module in root.modules()]
        self._children = [module._modules for module in root.modules()]
        self._found = self._count()

    @property
    def holds(self) -> bool:
        return self._count() == self._found

    def _count(self) -> tuple[int, list[list[nn.Module | None]]]:
        return sum(map(len, self._params)), [list(children.values()) for children in self._children if children]


def _refuse_unmanaged(root: nn.Module, managed: set[nn.Parameter], ignored: set[nn.Parameter]) -> None:
    """Parameters that were added after `fully_shard` would silently train apart on every rank."""
    late = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in root.named_modules()
        if not _torch.is_replicated_by_torch(module)
        for name, param in module._parameters.items()
        if param is not None and param not in managed and param not in ignored
        # A module that was wrapped after the first forward is a root of its own.
        if managed_as(param) is None or not isinstance(param, DTensor)
    ]
    if late:
        raise VescaleError(
            f"no fully_shard call manages {late}: added afterwards, they would be neither sharded nor reduced. Add "
            f"parameters before fully_shard, or pass them in ignored_params."
        )


def _refuse_unknown_ignored(root: nn.Module, ignored: Iterable[nn.Parameter]) -> None:
    known = set(root.parameters())
    unknown = [tuple(param.shape) for param in ignored if param not in known]
    if unknown:
        raise VescaleError(
            f"ignored_params holds {len(unknown)} parameters that are not in {type(root).__name__}, of shapes "
            f"{unknown[:5]}. Pass parameters of the model that is wrapped."
        )
