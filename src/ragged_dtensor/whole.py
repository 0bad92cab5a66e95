"""Questions about a whole tensor that its ranks answer together at once: equality, argmax, found infinities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from ragged_dtensor import _torch
from ragged_dtensor.agreement import fit, result_placements
from ragged_dtensor.contributions import agreed, neutral
from ragged_dtensor.elementwise import on_slices
from ragged_dtensor.op_call import OpCall, is_participating, refusal, replicated, spec_like
from ragged_dtensor.ownership import local_piece
from ragged_dtensor.placement import RaggedShard


def equal(call: OpCall) -> bool:
    """`torch.equal` and `torch.allclose`: every rank compares its elements, and all have to say yes."""
    operands = call.operands
    shape = operands[0].shape
    if operands[1].shape != shape:
        if call.name == "equal":
            return False
        raise refusal(call, f"the shapes {shape} and {operands[1].shape} differ")
    if any(isinstance(placement, Partial) for operand in operands for placement in operand.spec.placements):
        raise refusal(call, "an operand is still to be reduced")
    placements = result_placements(call, shape, operands)
    found = fit(call, spec_like(call.ragged.spec, placements, call.ragged.spec.tensor_meta), operands)
    if not is_participating(call.mesh):
        return True
    if found.redistributed:
        _torch.redistribute_arguments(call.info, call.with_operand_specs(found.redistributed))
    args, kwargs = _torch.local_arguments(call.info)
    answer = torch.tensor(on_slices(call.op, found.sliced, *args, **kwargs), device=args[0].device)
    return bool(agreed(answer, call.mesh, _held_in_parts(placements), "min"))


def _held_in_parts(placements: Sequence[object]) -> tuple[int, ...]:
    return tuple(axis for axis, placement in enumerate(placements) if not isinstance(placement, Replicate))


def first_extreme(call: OpCall) -> Any:
    """argmax and argmin over all elements: the flat index of the first one."""
    placements = call.spec.placements
    if call.argument("dim") is not None or any(not isinstance(p, RaggedShard | Replicate) for p in placements):
        raise refusal(call, "the index along a cut dim, or beside another cut, is not worked out")
    shape, is_max = tuple(call.spec.shape), call.name == "argmax"
    if not math.prod(shape):
        raise refusal(call, "a tensor without elements has no largest one")
    (local, *_), _ = _torch.local_arguments(call.info)
    start = local_piece(shape, placements, call.mesh).boxes()
    axes = _held_in_parts(placements)
    index = torch.full((), math.prod(shape), dtype=torch.int64, device=local.device)
    value = local.new_full((), neutral(is_max, local.dtype))
    if local.numel():
        index = call.op(local) + _flat_offset(start[0].offsets, shape)
        value = local.flatten()[call.op(local)]
    best = agreed(value, call.mesh, axes, "max" if is_max else "min")
    is_best = (value == best) | (value.isnan() & best.isnan())
    index = torch.where(is_best, index, math.prod(shape))
    first = agreed(index, call.mesh, axes, "min")
    keepdim = bool(call.argument("keepdim", False))
    spec = spec_like(call.spec, replicated(call.mesh), call.metas[0])
    return _torch.wrap(call.op, call.args, call.kwargs, first.reshape((1,) * len(shape) if keepdim else ()), spec)


def _flat_offset(offsets: Sequence[int], shape: Sequence[int]) -> int:
    flat = 0
    for offset, size in zip(offsets, shape, strict=True):
        flat = flat * size + offset
    return flat


def check_and_unscale(call: OpCall) -> None:
    """GradScaler: unscale the gradients in place; every rank learns whether any rank found an infinity or NaN."""
    gradients, found_inf = call.args[0], call.args[1]
    assert isinstance(gradients, list | tuple)
    assert isinstance(found_inf, torch.Tensor)
    if any(isinstance(p, Partial) for gradient in gradients for p in _placements(gradient)):
        raise refusal(call, "a gradient is still to be reduced")
    args, kwargs = _torch.local_arguments(call.info)
    call.op(*args, **kwargs)
    found = args[1]
    for mesh, axes in _meshes(gradients).items():
        found.copy_(agreed(found, mesh, tuple(axes), "max"))


def _placements(tensor: object) -> tuple[Any, ...]:
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else ()


def _meshes(gradients: Sequence[object]) -> dict[DeviceMesh, dict[int, None]]:
    """Per mesh the axes on which some gradient is held in parts, in the order in which they are met."""
    meshes: dict[DeviceMesh, dict[int, None]] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            axes = meshes.setdefault(gradient.device_mesh, {})
            axes.update(dict.fromkeys(_held_in_parts(gradient.placements)))
    return meshes


def number(call: OpCall) -> Any:
    """`x.item()`: the rank's own element would be another number, or none, on every rank."""
    raise refusal(call, "its ranks hold different elements", "Take the whole tensor: x.full_tensor().item().")


WHOLE = {
    "_amp_foreach_non_finite_check_and_unscale_": check_and_unscale,
    "_local_scalar_dense": number,
    "allclose": equal,
    "argmax": first_extreme,
    "argmin": first_extreme,
    "equal": equal,
}
