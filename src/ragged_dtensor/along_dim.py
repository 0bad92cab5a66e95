"""Ops along one dim, such as softmax or a maximum with its index: each rank has whole rows of a dim that is not cut."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.tensor.placement_types import Replicate

from ragged_dtensor._torch import OutputSharding
from ragged_dtensor.elementwise import num_flat_or_none
from ragged_dtensor.op_call import Answer, Local, OpCall, refusal, spec_like
from ragged_dtensor.placement import RaggedShard

ALONG_ONE_DIM = {
    "_log_softmax",
    "_log_softmax_backward_data",
    "_softmax",
    "_softmax_backward_data",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "logcumsumexp",
}


def along_dim(call: OpCall) -> Answer:
    """The op itself on each rank, along the local tensor's name of the dim."""
    rank = len(call.spec.shape)
    flat = num_flat_or_none(tuple(call.spec.placements)) or 0
    dim = call.argument("dim")
    if not isinstance(dim, int) or not rank:
        raise refusal(call, "it needs one dim that is not cut")
    dim %= rank
    if dim < flat:
        raise refusal(call, f"it goes along dim {dim}, which is cut")
    if any(not isinstance(p, RaggedShard | Replicate) for p in call.spec.placements):
        raise refusal(call, "it goes along a dim beside another cut or a due reduction")
    if any(operand.spec.placements != call.spec.placements for operand in call.operands):
        raise refusal(call, "its operands are placed differently")
    specs = tuple(spec_like(call.spec, call.spec.placements, meta) for meta in call.metas)
    spec = specs[0] if len(specs) == 1 else specs
    if flat < 2:
        return OutputSharding(spec)  # local dims have the names of full ones
    position = next(i for i, argument in enumerate(call.op._schema.arguments) if argument.name == "dim")
    compute = functools.partial(_along, call.op, position, dim - flat + 1)
    return Local(spec, compute)


def _along(op: Any, position: int, dim: int, /, *args: Any, **kwargs: Any) -> Any:
    if "dim" in kwargs:
        return op(*args, **{**kwargs, "dim": dim})
    return op(*args[:position], dim, *args[position + 1 :], **kwargs)
