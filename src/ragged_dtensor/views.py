"""Views: the same memory under another shape. A reshape keeps a ragged cut; what would reorder or select raises.

A cut of contiguous memory does not care about dims, so that a view only renames it: (6, 4) cut by rows into 1 + 2 is
(24,) cut into 1 + 2. The new placement takes the fewest leading dims that the units divide, whole rows if possible.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ragged_dtensor._torch import OpSchema, OutputSharding
from ragged_dtensor.elementwise import num_flat_or_none
from ragged_dtensor.op_call import (
    Answer,
    Local,
    OpCall,
    Placements,
    dtype_of,
    is_participating,
    num_flat,
    refusal,
    spec_like,
)
from ragged_dtensor.ownership import local_piece
from ragged_dtensor.placement import RaggedShard, StridedRaggedShard

aten = torch.ops.aten

Shape = tuple[int, ...]

RESHAPES = {
    "_unsafe_view",
    "reshape",
    "squeeze",
    "unsqueeze",
    "view",
    "view_as",
    "_reshape_alias",
    "flatten",
    "view_copy",
}

# Of which torch replaces the sizes by those of a schema.
TAKES_SIZES = {aten.view.default, aten._unsafe_view.default}


def reshaped(call: OpCall) -> Answer:
    """A view in memory order: view, squeeze, unsqueeze, flatten."""
    meta = call.metas[0]
    if meta.dtype == dtype_of(call.spec) and meta.shape == call.spec.shape:
        return Local(spec_like(call.spec, call.spec.placements, meta), _alias)
    placements = reshaped_placements(call, tuple(call.spec.shape), tuple(meta.shape))
    if call.op in TAKES_SIZES and is_participating(call.mesh):
        sizes = local_piece(meta.shape, placements, call.mesh).local_shape
        schema = OpSchema(call.op, (call.spec, list(sizes)), {}, schema_info=call.schema.schema_info)
        spec = spec_like(call.spec, placements, meta)
        return OutputSharding(spec, schema, needs_redistribute=True, use_val_from_redistribute_schema=True)
    trailing = tuple(meta.shape[num_flat(placements) :])
    if meta.dtype != dtype_of(call.spec):  # x.view(torch.int32): bits under another name
        if tuple(meta.shape) != tuple(call.spec.shape):
            raise refusal(call, f"{meta.dtype} has another size than {dtype_of(call.spec)}")
        return Local(spec_like(call.spec, placements, meta), functools.partial(_view_bits, meta.dtype))
    return Local(spec_like(call.spec, placements, meta), functools.partial(_view_rows, trailing))


def _view_bits(dtype: torch.dtype, local: torch.Tensor, /, *args: Any) -> torch.Tensor:
    return local.view(dtype)


def _view_rows(trailing: Shape, local: torch.Tensor, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    return local.view(local.numel() // max(1, math.prod(trailing)), *trailing)


def reshaped_placements(call: OpCall, shape: Shape, target: Shape) -> Placements:
    """The placements of a view of shape `target`: the same runs of memory on the same ranks."""
    placements: Placements = tuple(call.spec.placements)
    if shape == target:
        return placements
    others = [p for p in placements if not isinstance(p, RaggedShard) and (p.is_shard() or not p.is_replicate())]
    if others or any(isinstance(p, StridedRaggedShard) for p in placements):
        raise refusal(call, f"a view of shape {target} mixes dims that other mesh axes cut")
    if not math.prod(shape):
        return tuple(_reshaped(p, len(target)) if isinstance(p, RaggedShard) else p for p in placements)
    fewest = [_fewest_dims(p, target) if isinstance(p, RaggedShard) else 0 for p in placements]
    if sum(isinstance(p, RaggedShard) for p in placements) > 1:
        fewest = [len(target)] * len(placements)  # nested cuts: the inner one divides the rows of the outer one
    return tuple(
        _reshaped(p, dims) if isinstance(p, RaggedShard) else p for p, dims in zip(placements, fewest, strict=True)
    )


def _fewest_dims(placement: RaggedShard, target: Shape) -> int:
    if not target:
        return 0
    total = placement.local_units.total
    fitting = (dims for dims in range(1, len(target)) if math.prod(target[:dims]) % total == 0)
    return next(fitting, len(target))


def _reshaped(placement: RaggedShard, dims: int) -> RaggedShard:
    return RaggedShard(tuple(range(dims)), placement.local_units)


def expanded(call: OpCall) -> Answer:
    """`x.expand(size)`: along dims that are not cut."""
    shape, meta = tuple(call.spec.shape), call.metas[0]
    flat = num_flat_or_none(tuple(call.spec.placements)) or 0
    if len(meta.shape) != len(shape) or tuple(meta.shape[:flat]) != shape[:flat]:
        raise refusal(call, f"expanding to {tuple(meta.shape)} repeats dims that are cut")
    for placement in call.spec.placements:
        if placement.is_shard() and meta.shape[placement.dim] != shape[placement.dim]:  # type: ignore[attr-defined]
            raise refusal(call, f"expanding to {tuple(meta.shape)} repeats a dim that {placement} cuts")
    sizes = tuple(-1 if a == b else b for a, b in zip(shape[flat:], meta.shape[flat:], strict=True))
    return Local(spec_like(call.spec, call.spec.placements, meta), functools.partial(_expand_local, sizes))


def _expand_local(sizes: Shape, local: torch.Tensor, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    return local.expand(-1, *sizes)


def unchanged(call: OpCall) -> Answer:
    """Ops that may turn out to change nothing, such as `x[:]` or the transpose of a vector; otherwise they raise."""
    meta = call.metas[0]
    spec = call.spec
    is_whole = tuple(meta.shape) == tuple(spec.shape) and tuple(meta.stride) == tuple(spec.stride)
    if not is_whole or (call.name == "t" and len(spec.shape) > 1) or not _keeps_order(call):
        raise refusal(call, "it selects or reorders elements")
    return Local(spec_like(spec, spec.placements, meta), _alias)


def _keeps_order(call: OpCall) -> bool:
    """Equal shape and stride prove it for a slice; for a permutation only the identity does."""
    if call.name == "permute":
        dims = [dim % len(call.spec.shape) for dim in call.argument("dims", ())]
        return dims == sorted(dims)
    if call.name == "transpose":
        rank = max(1, len(call.spec.shape))
        return bool(call.argument("dim0") % rank == call.argument("dim1") % rank)
    return True


def _alias(local: torch.Tensor, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    return local.view(local.shape)


UNCHANGED = {"permute", "slice", "t", "transpose", "as_strided"}
