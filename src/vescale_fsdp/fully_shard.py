"""fully_shard: shard a module's parameters over a mesh, in place; torch's name, signature and meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims

from . import _torch
from .errors import VescaleError
from .group.encoded_group import EncodedGroup, is_handed
from .group.extension_group import ExtensionGroup
from .group.param_group import ParamGroup
from .group.streams import streams_of
from .grouping import Members, plan_groups
from .guards import watch_optimizers
from .managed import ManagedParam, check_param, find_buffers, find_managed, warn_of_losses
from .mesh import DataMesh, default_mesh
from .module import FSDPModule
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, ParamPolicy
from .preflight import Circle, failing_together
from .state import ModuleState, find_state

__all__ = ["fully_shard"]

_WRAPPED: dict[type[nn.Module], type[nn.Module]] = {}


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    param_policy: Callable[[str, nn.Parameter], ParamPolicy | None] | None = ...,
    max_lanes: int | None = ...,
) -> FSDPModule: ...
@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    param_policy: Callable[[str, nn.Parameter], ParamPolicy | None] | None = ...,
    max_lanes: int | None = ...,
) -> list[FSDPModule]: ...
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen; torch's default)
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008  (torch's default)
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    param_policy: Callable[[str, nn.Parameter], ParamPolicy | None] | None = None,
    max_lanes: int | None = None,
) -> Any:
    """Shard the parameters of `module` (or of a list of modules, as one unit) over `mesh`; returns the same object.

    Call it bottom-up: each parameter belongs to the innermost wrapped module that holds it. Parameters become DTensors
    with RaggedShard placements; forward and backward gather them into one buffer per group, gradients are reduced into
    the shards. Parameters of different dtypes become groups of their own, and so do frozen ones and block formats.

    mesh: 1-D to shard over it, 2-D to replicate over its first and shard over its second axis. Default: all ranks.
        Parameters that are DTensors on other axes of its root (tensor, expert parallelism) are sharded over these too.
    reshard_after_forward: free parameters after forward, gather them again in backward. None: True, but not for root.
    shard_placement_fn: fn(param) -> a Shard, torch's ShardPlacementResult or None. A result's mesh is where the
        parameter is sharded; its dim is not followed, since a ragged cut needs no dim that divides. Gradients of a
        DTensor with a smaller mesh than the call's (experts on data ranks) are divided by the size of the call's.
    mp_policy: dtypes of computation, reduction and outputs.
    offload_policy: CPUOffloadPolicy keeps shards, gradients and optimizer states on the CPU; None is no offload.
    ignored_params: parameters that stay as they are.
    dp_mesh_dims: names of the data axes of `mesh`, on all of whose axes parameters are DTensors already.
    param_policy: fn(fqn, param) -> ParamPolicy or None: what may not be cut, block formats, optimizers. A parameter
        with a format is gathered as its codes and scales; the unsharded one holds the decoded values, through which
        gradients pass straight to the shard, which keeps its dtype.
    max_lanes: how many flat buffers a group may use; None decides by what they save.
    """
    data_mesh = DataMesh.of(mesh if mesh is not None else default_mesh(), dp_mesh_dims)
    ignored = frozenset(ignored_params or ())
    with failing_together([_circle_of(module, data_mesh)]):
        modules = _modules_of(module)
        managed = find_managed(modules, ignored)
        for each in managed:
            check_param(each)
        _move_to_device(modules, managed, data_mesh.device)
        planned = plan_groups(
            managed,
            data_mesh,
            mp_policy,
            placement_fn=shard_placement_fn,
            param_policy=param_policy,
            max_lanes=max_lanes,
        )
        reshards = [_reshard_after_forward(reshard_after_forward, members) for members in planned]
    warn_of_losses(managed)
    pin = offload_policy.pin_memory if isinstance(offload_policy, CPUOffloadPolicy) else None
    groups = [
        _kind_of(members)(
            members.managed,
            modules,
            members.plan,
            members.mesh,
            mp_policy=mp_policy,
            reshard_after_forward=reshard,
            offload_pin=pin,
            format=members.format,
        )
        for members, reshard in zip(planned, reshards, strict=True)
    ]
    state = ModuleState(
        modules, groups, mp_policy=mp_policy, reshard_is_automatic=reshard_after_forward is None, ignored=ignored
    )
    watch_optimizers(groups)
    state.schedule.streams = streams_of(data_mesh.device)
    for each_module in modules:
        _wrap_class(each_module)
    return module


def _kind_of(members: Members) -> Any:
    """The class of its group."""
    if members.gathers_itself:
        return ExtensionGroup
    first = members.managed[0]
    if members.format is not None and (not first.param.requires_grad or is_handed(first)):
        return EncodedGroup
    return ParamGroup


def _circle_of(module: Any, data_mesh: DataMesh) -> Circle:
    """All ranks that an error in wrapping `module`, which nobody has checked yet, concerns."""
    given = module if isinstance(module, (list, tuple)) else [module]
    params = (param for each in given if isinstance(each, nn.Module) for param in each.parameters())
    return Circle.of(data_mesh, params)


def _modules_of(module: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    given = (module,) if isinstance(module, nn.Module) else tuple(module) if isinstance(module, Iterable) else module
    if not isinstance(given, tuple) or not all(isinstance(each, nn.Module) for each in given):
        raise TypeError(f"fully_shard takes a module or a flat list of modules, got {module!r}")
    if not given:
        raise ValueError("fully_shard was given an empty list of modules")
    below = {child for each in given for child in each.modules() if child is not each}
    modules = tuple(each for each in dict.fromkeys(given) if each not in below)
    for each in modules:
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {each}")
        if find_state(each) is not None:
            raise VescaleError(f"fully_shard was applied to this module before; wrap it once:\n{each}")
        for child in each.modules():
            if _torch.state_of(child) is not None and find_state(child) is None:
                raise VescaleError(
                    f"torch's own fully_shard wraps this module; use one of the two in a model:\n{child}"
                )
    return modules


def _reshard_after_forward(given: bool | int | None, members: Members) -> bool | int:
    """A number of ranks only if it lies between one and all of them."""
    mesh = members.mesh
    if given is None or isinstance(given, bool):
        return given is not False
    if given < 1 or given > mesh.num_ranks or mesh.num_ranks % given:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {mesh.num_ranks}, not {given}"
        )
    if given in (1, mesh.num_ranks):
        return given != 1
    if members.gathers_itself:
        # What it sends is known at its first gather only, and FSDP2 refuses it too: in backward, without a word.
        fqns = [each.fqn for each in members.managed]
        raise NotImplementedError(
            f"{fqns}: subclasses that gather themselves keep no shard over {given} ranks after forward. Pass "
            f"reshard_after_forward=True or False to the call that wraps them."
        )
    mesh.regrouped(given)  # makes process groups, which all ranks must do now
    return given


def _move_to_device(modules: Sequence[nn.Module], managed: Sequence[ManagedParam], device: torch.device) -> None:
    for tensor in [*find_buffers(modules), *(each.param for each in managed)]:
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.to(device)
    on_meta = [each.fqn for each in managed if each.param.is_meta]
    if 0 < len(on_meta) < len(managed):
        raise VescaleError(
            f"some parameters are on the meta device and others are not: {on_meta}. Shard them all on meta and call "
            f"to_empty, or materialise these first."
        )


def _wrap_class(module: nn.Module) -> None:
    """Put FSDPModule first among the bases of the module's class, so that its methods win."""
    cls = type(module)
    if cls not in _WRAPPED:
        _WRAPPED[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _refuse_deepcopy})
    module.__class__ = _WRAPPED[cls]


def _refuse_deepcopy(self: nn.Module, memo: object) -> NoReturn:
    raise VescaleError(
        f"{type(self).__name__} cannot be copied with deepcopy: its parameters are views of shared buffers. Build a "
        f"second model and load this one's state_dict(), or use ShardedEMA for an average of the weights."
    )
