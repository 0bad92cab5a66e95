"""Which parameters one `fully_shard` call manages: modules in, ManagedParams out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from . import _torch
from .home import Home

__all__ = [
    "ManagedParam",
    "check_param",
    "find_buffers",
    "find_managed",
    "forget_managed",
    "is_sharded",
    "managed_as",
    "mark_managed",
    "warn_of_losses",
]


@dataclass(frozen=True, eq=False)
class ManagedParam:
    """A parameter, the name by which its wrapped module knows it, and every place that holds it (several when tied)."""

    fqn: str
    param: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    home: Home | None = None
    """Where its shards live, once that is known."""

    def name_below(self, names: Mapping[nn.Module, str]) -> str:
        """The fqn under a root whose modules have `names`."""
        module, name = self.owners[0]
        return f"{names[module]}.{name}" if names.get(module) else name

    @property
    def module(self) -> nn.Module:
        return self.owners[0][0]


_OWNER = "_vescale_fqn"
"""Set on a parameter, and on the one that replaces it, once a `fully_shard` call manages it: its name in that call."""


_SHARDED = "_vescale_sharded"
"""Set on a parameter that is the sharded one: a DTensor alone may be what another parallelism made."""


def mark_managed(param: nn.Parameter, fqn: str, *, sharded: bool = False) -> None:
    setattr(param, _OWNER, fqn)
    setattr(param, _SHARDED, sharded)


def forget_managed(param: nn.Parameter) -> None:
    """Undo `mark_managed`: another `fully_shard`, torch's or ours, may manage the parameter."""
    vars(param).pop(_OWNER, None)
    vars(param).pop(_SHARDED, None)


def managed_as(param: nn.Parameter) -> str | None:
    """The name by which an earlier `fully_shard` call manages the parameter, or None."""
    return getattr(param, _OWNER, None)


def is_sharded(param: nn.Parameter) -> bool:
    """Whether the parameter is one that `fully_shard` made, and not what it replaces or lends to forward."""
    return getattr(param, _SHARDED, False)


def find_managed(roots: Sequence[nn.Module], ignored: Iterable[nn.Parameter] = ()) -> list[ManagedParam]:
    """Parameters of `roots` in module order, without `ignored` ones and those of modules that are wrapped already."""
    ignored = set(ignored)
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for root in roots:
        for module in root.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    owners.setdefault(param, []).append((module, name))
    managed = {}
    for fqn, param in _named_params(roots):
        if param not in ignored and param not in managed:
            managed[param] = ManagedParam(fqn, param, tuple(owners[param]))
    return list(managed.values())


def find_buffers(roots: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [buffer for _, module in _walk(roots) for buffer in module.buffers(recurse=False)]


def _named_params(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in _walk(roots):
        yield from module.named_parameters(prefix=prefix, recurse=False)


def _walk(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules with their names, depth first, not entering those that another call or torch's `replicate` manages."""
    seen: set[nn.Module] = set()
    for index, root in enumerate(roots):
        yield from _descend(f"{index}" if len(roots) > 1 else "", root, seen, root)


def _descend(prefix: str, module: nn.Module, seen: set[nn.Module], root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if module in seen or _torch.is_replicated_by_torch(module):
        return
    if module is not root and _torch.state_of(module) is not None:
        return
    seen.add(module)
    yield prefix, module
    for name, child in module.named_children():
        yield from _descend(f"{prefix}.{name}" if prefix else name, child, seen, root)


def warn_of_losses(managed: Sequence[ManagedParam]) -> None:
    """Name what a parameter has that its sharded replacement will not have."""
    lost = []
    for each in managed:
        if count := _torch.tensor_hooks(each.param):
            lost.append(
                f"{each.fqn}: {count} tensor hook{'s' if count > 1 else ''} (register it on the sharded parameter "
                f"with register_post_accumulate_grad_hook)"
            )
        if each.param.grad is not None:
            lost.append(f"{each.fqn}: its gradient (compute gradients after fully_shard)")
    if lost:
        warnings.warn("fully_shard replaces parameters, and drops " + "; ".join(lost), stacklevel=3)


def check_param(managed: ManagedParam) -> None:
    """Raise, naming the parameter, where it cannot be sharded as it is."""
    param = managed.param
    if (other := managed_as(param)) is not None:
        raise ValueError(
            f"{managed.fqn} is the same parameter as {other}, which another fully_shard call manages. Put the modules "
            f"that share it into one group: fully_shard([module_a, module_b])."
        )
    if not param.is_contiguous():
        raise NotImplementedError(
            f"{managed.fqn}: shape {tuple(param.shape)} has stride {param.stride()}, but only contiguous parameters "
            f"are sharded. Call .contiguous() on it first."
        )
