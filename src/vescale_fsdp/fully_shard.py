"""fully_shard: shard a module's parameters over a mesh, in place; torch's name, signature and meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims

from .errors import VescaleError
from .group import ParamGroup
from .managed import ManagedParam, check_param, find_buffers, find_managed
from .mesh import DataMesh, default_mesh
from .module import FSDPModule
from .planner import plan_group
from .policy import MixedPrecisionPolicy, OffloadPolicy, ParamPolicy
from .spec import ParamSpec, alignment
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
    offload_policy: OffloadPolicy = ...,
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
    offload_policy: OffloadPolicy = ...,
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
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  (torch's default)
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    param_policy: Callable[[str, nn.Parameter], ParamPolicy | None] | None = None,
    max_lanes: int | None = None,
) -> Any:
    """Shard the parameters of `module` (or of a list of modules, as one unit) over `mesh`; returns the same object.

    Call it bottom-up: each parameter belongs to the innermost wrapped module that holds it. Parameters become DTensors
    with RaggedShard placements; forward and backward gather them into one buffer per group, gradients are reduced into
    the shards. Parameters of different dtypes become groups of their own, and so do frozen ones.

    mesh: 1-D to shard over it, 2-D to replicate over its first and shard over its second axis. Default: all ranks.
    reshard_after_forward: free parameters after forward, gather them again in backward. None: True, but not for root.
    mp_policy: dtypes of computation, reduction and outputs.
    ignored_params: parameters that stay as they are.
    param_policy: fn(fqn, param) -> ParamPolicy or None: what may not be cut, block formats, optimizers.
    max_lanes: how many flat buffers a group may use; None decides by what they save.
    """
    _refuse_unbuilt(shard_placement_fn, offload_policy, dp_mesh_dims, param_policy, reshard_after_forward)
    modules = _modules_of(module)
    data_mesh = DataMesh.of(mesh if mesh is not None else default_mesh())
    managed = find_managed(modules, ignored_params or ())
    for each in managed:
        check_param(each, data_mesh.device)
    _move_buffers(modules, data_mesh.device)
    reshard = True if reshard_after_forward is None else reshard_after_forward
    groups = [_make_group(members, modules, data_mesh, mp_policy, reshard, max_lanes) for members in _split(managed)]
    ModuleState(modules, groups, mp_policy=mp_policy, reshard_is_automatic=reshard_after_forward is None)
    for each_module in modules:
        _wrap_class(each_module)
    return module


def _refuse_unbuilt(
    shard_placement_fn: object,
    offload_policy: OffloadPolicy,
    dp_mesh_dims: object,
    param_policy: object,
    reshard: object,
) -> None:
    if shard_placement_fn is not None:
        raise NotImplementedError("shard_placement_fn: placement per parameter is not built yet")
    if type(offload_policy) is not OffloadPolicy:
        raise NotImplementedError(f"offload_policy={offload_policy}: offloading is not built yet")
    if dp_mesh_dims is not None:
        raise NotImplementedError("dp_mesh_dims: named data-parallel axes are not built yet")
    if param_policy is not None:
        raise NotImplementedError("param_policy: wishes per parameter are not built yet")
    if reshard is not None and not isinstance(reshard, bool):
        raise NotImplementedError(f"reshard_after_forward={reshard}: resharding to fewer ranks is not built yet")


def _modules_of(module: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    given = (module,) if isinstance(module, nn.Module) else tuple(module)
    below = {child for each in given for child in each.modules() if child is not each}
    modules = tuple(each for each in dict.fromkeys(given) if each not in below)
    for each in modules:
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {each}")
        if find_state(each) is not None:
            raise VescaleError(f"fully_shard was applied to this module before; wrap it once:\n{each}")
    return modules


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for buffer in find_buffers(modules):
        if buffer.device != device and not buffer.is_meta:
            buffer.data = buffer.to(device)


def _split(managed: Sequence[ManagedParam]) -> list[list[ManagedParam]]:
    """One list per dtype and trainability: a frozen parameter then costs no gradient memory."""
    groups: dict[tuple[torch.dtype, bool], list[ManagedParam]] = {}
    for each in managed:
        groups.setdefault((each.param.dtype, each.param.requires_grad), []).append(each)
    return list(groups.values())


def _make_group(
    managed: Sequence[ManagedParam],
    modules: tuple[nn.Module, ...],
    mesh: DataMesh,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int,
    max_lanes: int | None,
) -> ParamGroup:
    specs = [ParamSpec(each.fqn, tuple(each.param.shape), _name(each.param.dtype)) for each in managed]
    dtypes = {managed[0].param.dtype, mp_policy.param_dtype, mp_policy.reduce_dtype, torch.bfloat16}
    unit = alignment(_name(dtype) for dtype in dtypes if dtype is not None)
    plan = plan_group(specs, mesh.num_ranks, unit=unit, align=unit, max_lanes=max_lanes)
    return ParamGroup(managed, modules, plan, mesh, mp_policy=mp_policy, reshard_after_forward=reshard_after_forward)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wrap_class(module: nn.Module) -> None:
    """Put FSDPModule first among the bases of the module's class, so that its methods win."""
    cls = type(module)
    if cls not in _WRAPPED:
        _WRAPPED[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _refuse_deepcopy})
    module.__class__ = _WRAPPED[cls]


def _refuse_deepcopy(self: nn.Module, memo: object) -> NoReturn:
    raise VescaleError(
        f"{type(self).__name__} cannot be copied with deepcopy: its parameters are views of shared buffers. Build a "
        f"second model and load this one's state_dict()."
    )
