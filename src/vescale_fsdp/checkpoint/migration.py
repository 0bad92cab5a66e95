"""A live model changes from torch's fully_shard to ours, or back, in place: same modules, same Parameter objects.

    FSDP2, Shard(0)  --from_fsdp2-->  ours, RaggedShard  --to_fsdp2-->  FSDP2, Shard(0)

Everything is wrapped on the meta device first, so that what cannot be done is found while nothing has changed. Then
values, gradients and optimizer state move group by group, each kind in one all-to-all: no rank holds a whole tensor,
and what a rank holds beside the model is at most four of its shards of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Placement

from .. import _torch
from ..fsdp2_seams import Fsdp2Unit, forget_fsdp2, fsdp2_units
from ..fully_shard import fully_shard
from ..group.param_group import ParamGroup
from ..grouping import ParamPolicyFn
from ..managed import forget_managed
from ..module import FSDPModule
from ..plan import Plan
from ..policy import CPUOffloadPolicy, OffloadPolicy
from ..preflight import Statement, agree
from ..state import ModuleState, find_state
from .errors import CheckpointError, together
from .exchange import exchange_locals

__all__ = ["from_fsdp2", "to_fsdp2"]

Optimizer = torch.optim.Optimizer
Place = tuple[nn.Module, str]
"""Where a parameter is held: a module, and the name there."""


@torch.no_grad()
def from_fsdp2(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    param_policy: ParamPolicyFn | None = None,
    max_lanes: int | None = None,
) -> nn.Module:
    """Turn `model`, which torch's fully_shard wrapped, into one of ours, and move its optimizer's state along.

    In place: modules, Parameter objects and the optimizer's parameter groups stay, so that the next step is the one
    that FSDP2 would have taken. Mesh, policies and what setters changed are carried over. Every rank calls it, between
    iterations. `param_policy` and `max_lanes` are those of `fully_shard`.

    Raises CheckpointError on all ranks, with everything as it was, if something cannot be taken over.
    """
    for module in model.modules():
        if isinstance(module, TorchFSDPModule):
            module.reshard()
    units = fsdp2_units(model)
    names = {param: fqn for fqn, param in model.named_parameters()}
    olds = {place: each for unit in units for each in unit.params for place in each.owners}
    params = {place: each.param for place, each in olds.items()}
    together(lambda: _check_units(units, names))
    _agree_on_state(optimizer, params.values(), names)
    with _as_it_was_on_error(model):
        try:
            _rewrap(model, units, param_policy, max_lanes)
        except BaseException:
            for unit in units:
                unit.put_back()
            raise
    for group in _groups(model):
        places = [each.owners[0] for each in group.shards.managed]
        mine = [params[place] for place in places]
        afters = [_as_dtensor(param).placements for param in group.shards.params]
        group.take_over(mine, exchange_locals([_as_dtensor(param) for param in mine], afters))
        for place in places:
            olds[place].forget()
        _move_state(mine, optimizer)
    return model


@torch.no_grad()
def to_fsdp2(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
) -> nn.Module:
    """Turn `model`, which our fully_shard wrapped, into one of torch's; the reverse of `from_fsdp2`.

    `shard_placement_fn` is that of torch's fully_shard. What torch refuses (scalars, several dtypes in one call),
    tensor-parallel parameters, and optimizer state not cut as its parameter is (AdamW8bit, Shampoo) are refused.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    states, groups = _states(model), _groups(model)
    names = {param: fqn for fqn, param in model.named_parameters()}
    together(lambda: _check_states(states, names))
    _agree_on_state(optimizer, [each.param for group in groups for each in group.shards.managed], names)
    with _as_it_was_on_error(model):
        try:
            together(lambda: _wrap_by_torch(model, states, shard_placement_fn))
        except BaseException:
            forget_fsdp2(model)
            raise
    news = {place: each for unit in fsdp2_units(model) for each in unit.params for place in each.owners}
    for group in groups:
        places, mine = zip(*((each.owners[0], each.param) for each in group.shards.managed), strict=True)
        afters = [_as_dtensor(news[place].param).placements for place in places]
        values = exchange_locals([_as_dtensor(param) for param in mine], afters)
        group.shards.buffer.free()
        for place, param in zip(places, mine, strict=True):
            news[place].replace(param, values.pop(0))
            forget_managed(param)
        _move_state(mine, optimizer)
    return model


# Checks, before anything changes


def _check_units(units: Sequence[Fsdp2Unit], names: Mapping[nn.Parameter, str]) -> None:
    if not units:
        raise CheckpointError("torch's fully_shard wrapped nothing in this model")
    lines = [f"{type(unit.modules[0]).__name__}: {unit.problem}" for unit in units if unit.problem]
    lines += [f"{names[each.param]}: {each.problem}" for unit in units for each in unit.params if each.problem]
    if lines:
        raise CheckpointError("\n".join(["cannot be taken over from torch's fully_shard:", *lines[:10]]))


def _check_states(states: Sequence[ModuleState], names: Mapping[nn.Parameter, str]) -> None:
    if not states:
        raise CheckpointError("our fully_shard wrapped nothing in this model")
    lines = []
    for state in states:
        if len({group.shards.dtype for group in state.groups if group.shards.is_trainable}) > 1:
            lines.append(f"{type(state.modules[0]).__name__}: has several dtypes, of which torch takes one a call")
    for group in (group for state in states for group in state.groups):
        name = names[group.shards.params[0]]
        if group.reduction.holds_memory:
            lines.append(f"{name}: holds gradients that are not reduced yet; reduce them first")
        if any(home.given is not None for home in group.shards.homes):
            lines.append(f"{name}: is sharded by tensor or expert parallelism as well, which is not built yet")
        if group.shards.is_meta:
            lines.append(f"{name}: is on the meta device; call to_empty(device=...) and load it first")
        if group.quantized is not None:
            lines.append(f"{name}: is gathered in {group.quantized.format.name}, which torch's fully_shard cannot do")
        if group.all_gather_comm is not None or group.reduction.hook is not None:
            lines.append(f"{name}: has custom collectives or an all-reduce hook; set them again on the new model")
    if lines:
        raise CheckpointError("\n".join(["cannot be given to torch's fully_shard:", *lines[:10]]))


def _agree_on_state(
    optimizer: Optimizer | None, params: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]
) -> None:
    """Every rank will move the same tensors, each cut as its parameter is; CheckpointError on all ranks if not."""
    distinct = list(dict.fromkeys(params))
    found = together(lambda: [entry for param in distinct for entry in _state_entries(optimizer, param, names[param])])
    for rank, entries in enumerate(found):
        if entries != found[0]:
            one = next(iter(set(entries) ^ set(found[0])), "their order")
            raise CheckpointError(f"the optimizer's state differs between ranks 0 and {rank}: {one}")


def _state_entries(optimizer: Optimizer | None, param: nn.Parameter, fqn: str) -> list[tuple[str, str, torch.dtype]]:
    entries = [(fqn, "grad", param.grad.dtype)] if param.grad is not None else []
    for key, value in _tensor_state(optimizer, param):
        placed = isinstance(value, DTensor) and value.placements == _as_dtensor(param).placements
        if not placed or value.shape != param.shape or not value.is_floating_point():
            raise CheckpointError(
                f"{fqn}: the optimizer's {key} of shape {tuple(value.shape)} and {value.dtype} is not cut as the "
                f"parameter is. Save a checkpoint and load it into a new model instead."
            )
        entries.append((fqn, key, value.dtype))
    return entries


# Wrapping on the meta device


def _rewrap(
    model: nn.Module, units: Sequence[Fsdp2Unit], param_policy: ParamPolicyFn | None, max_lanes: int | None
) -> None:
    for unit in units:
        unit.remove()
    placed = {
        id(_put_meta(each.owners, each.param)): _Placed(each.placement, each.mesh_info, unit.mesh_info)
        for unit in units
        for each in unit.params
    }
    ignored = [param for param in model.parameters() if id(param) not in placed]
    a_mesh = next(unit.mesh_info.mesh for unit in units if unit.mesh_info is not None)
    for unit in units:
        fully_shard(
            list(unit.modules),
            shard_placement_fn=lambda param: placed[id(param)].for_us,
            ignored_params=ignored,
            param_policy=param_policy,
            max_lanes=max_lanes,
            **{"mesh": a_mesh, **unit.options},
        )
    for unit in units:
        _carry_settings(unit)
    plan = Plan(tuple(group.plan for group in _groups(model)))
    for mesh in {id(group.mesh.group): group.mesh for group in _groups(model)}.values():
        agree(mesh, Statement(plan.to_json()))


@dataclass(frozen=True)
class _Placed:
    """Where torch had a parameter: what `shard_placement_fn` returned for it, or would have."""

    placement: Placement
    mesh_info: Any
    mesh_info_of_call: Any

    @property
    def for_us(self) -> Any:
        """Itself, which has the parts of a ShardPlacementResult, if the mesh is not that of the call."""
        return self.placement if self.mesh_info is self.mesh_info_of_call else self


def _carry_settings(unit: Fsdp2Unit) -> None:
    settings, module = unit.settings, unit.modules[0]
    assert isinstance(module, FSDPModule)
    if settings:
        module.set_requires_gradient_sync(settings["reduce_grads"], recurse=False)
        module.set_requires_all_reduce(settings["all_reduce_grads"] and settings["reduce_grads"], recurse=False)
        module.set_reshard_after_backward(settings["reshard_after_backward"], recurse=False)
        module.set_unshard_in_backward(settings["unshard_in_backward"])
        module.set_force_sum_reduction_for_comms(settings["force_sum_reduction_for_comms"])
        if settings["gradient_divide_factor"] is not None:
            module.set_gradient_divide_factor(settings["gradient_divide_factor"])
        if "reduce_scatter_unused_params" in settings:
            module.set_reduce_scatter_unused_params(settings["reduce_scatter_unused_params"], recurse=False)
        if "reduce_scatter_max_input_buffers" in settings:
            module.set_reduce_scatter_max_input_buffers(settings["reduce_scatter_max_input_buffers"], recurse=False)
    forward, backward = unit.prefetched
    module.set_modules_to_forward_prefetch(forward)  # type: ignore[arg-type]  # wrapped by now
    module.set_modules_to_backward_prefetch(backward)  # type: ignore[arg-type]


def _wrap_by_torch(
    model: nn.Module, states: Sequence[ModuleState], placement_fn: Callable[[nn.Parameter], Any] | None
) -> None:
    for state in states:
        state.release()
        for module in state.modules:
            module.__class__ = type(module).__mro__[FSDPModule._orig_cls_mro_index]
    managed = [each for state in states for group in state.groups for each in group.shards.managed]
    metas = {id(_put_meta(each.owners, each.param)) for each in managed}
    ignored = {param for param in model.parameters() if id(param) not in metas}
    a_mesh = next(group.mesh.mesh for state in states for group in state.groups)
    for state in states:
        group = state.groups[0] if state.groups else None
        reshard = group.reshard_after_forward if group is not None else True
        torch_fully_shard(
            list(state.modules) if len(state.modules) > 1 else state.modules[0],
            mesh=group.mesh.mesh if group is not None else a_mesh,
            reshard_after_forward=None if state.reshard_is_automatic else reshard,
            mp_policy=state.mp_policy,
            shard_placement_fn=placement_fn,
            ignored_params=ignored,
            offload_policy=_offload_policy(group),
        )


def _offload_policy(group: ParamGroup | None) -> OffloadPolicy:
    pin = group.shards.offload_pin if group is not None else None
    return OffloadPolicy() if pin is None else CPUOffloadPolicy(pin_memory=pin)


def _put_meta(owners: Iterable[Place], param: nn.Parameter) -> nn.Parameter:
    """Put an unsharded parameter without memory where modules hold the sharded one."""
    meta = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad)
    vars(meta).update(vars(param))
    forget_managed(meta)
    for module, name in owners:
        module._parameters[name] = meta
    return meta


@contextmanager
def _as_it_was_on_error(model: nn.Module) -> Iterator[None]:
    """Give every module its class, hooks and parameters back if the body raises."""
    kept = [(module, module.__class__, dict(vars(module)), _copies(vars(module))) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls, values, contents in kept:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(values)
            for name, content in contents.items():
                values[name].clear()  # in place: the handles of hooks know these dicts
                values[name].update(content)
        raise


def _copies(values: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
    return {name: dict(value) for name, value in values.items() if isinstance(value, dict)}


# Moving


def _move_state(params: Sequence[nn.Parameter], optimizer: Optimizer | None) -> None:
    """Cut gradients and optimizer state as the parameters are cut now."""
    with_grad = [param for param in params if param.grad is not None]
    grads = _moved([_as_dtensor(param.grad) for param in with_grad], with_grad)
    for param, grad in zip(with_grad, grads, strict=True):
        param.grad = grad
    keys = sorted({key for param in params for key, _ in _tensor_state(optimizer, param)})
    for key in keys:
        assert optimizer is not None
        having = [param for param in params if key in dict(_tensor_state(optimizer, param))]
        moved = _moved([optimizer.state[param][key] for param in having], having)
        for param, value in zip(having, moved, strict=True):
            optimizer.state[param][key] = value


def _moved(tensors: Sequence[DTensor], params: Sequence[nn.Parameter]) -> list[DTensor]:
    specs = [_torch.spec_of(param) for param in params]
    locals_ = exchange_locals(tensors, [spec.placements for spec in specs])
    return [
        _torch.dtensor(local, _torch.with_dtype(spec, local.dtype)) for local, spec in zip(locals_, specs, strict=True)
    ]


def _tensor_state(optimizer: Optimizer | None, param: nn.Parameter) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's tensors for a parameter, in one order on all ranks; step counts stay where they are."""
    slots: Mapping[str, Any] = optimizer.state.get(param, {}) if optimizer is not None else {}
    return [(key, slots[key]) for key in sorted(slots) if isinstance(slots[key], torch.Tensor) and slots[key].ndim]


def _states(model: nn.Module) -> list[ModuleState]:
    """Of our fully_shard, inner calls first."""
    found = dict.fromkeys(state for module in model.modules() if (state := find_state(module)) is not None)
    return list(reversed(found))


def _groups(model: nn.Module) -> list[ParamGroup]:
    return [group for state in _states(model) for group in state.groups]


def _as_dtensor(tensor: torch.Tensor | None) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor
