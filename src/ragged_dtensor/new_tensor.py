"""`x.new_zeros(size)` and its kin: new tensors of any size that are placed as x is, where that means something."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate

from ragged_dtensor import _torch
from ragged_dtensor.op_call import Answer, Local, OpCall, is_participating, refusal, replicated, spec_like
from ragged_dtensor.ownership import local_piece
from ragged_dtensor.views import reshaped_placements

aten = torch.ops.aten

NEW_TENSOR = {"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"}


def new_tensor(call: OpCall) -> Answer:
    """Cut like x if it has the shape of x; otherwise whole on every rank, as torch does it.

    `orthogonal_` draws into `x.new_empty` of x's shape as a matrix: that is cut like x, too, and cannot be factored.
    """
    meta, shape = call.metas[0], tuple(call.spec.shape)
    if tuple(meta.shape) != shape and not (call.name == "new_empty" and tuple(meta.shape) == matrix_shape(shape)):
        return Local(spec_like(call.spec, replicated(call.mesh), meta), call.op)
    if tuple(meta.stride) != _torch.contiguous_stride(meta.shape):
        raise refusal(call, f"stride {tuple(meta.stride)}", "Ragged tensors are contiguous.")
    reshaped = reshaped_placements(call, shape, tuple(meta.shape))
    placements = [Replicate() if isinstance(placement, Partial) else placement for placement in reshaped]
    local = local_piece(meta.shape, placements, call.mesh).local_shape if is_participating(call.mesh) else ()
    return Local(spec_like(call.spec, placements, meta), functools.partial(_new_local, call.op, local))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], math.prod(shape[1:])) if len(shape) > 2 else shape


def _new_local(
    op: Any, shape: tuple[int, ...], local: torch.Tensor, size: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    if op is aten.new_empty_strided.default:
        return op(local, shape, _torch.contiguous_stride(shape), *args[1:], **kwargs)  # type: ignore[no-any-return]
    return op(local, shape, *args, **kwargs)  # type: ignore[no-any-return]
