"""Sums, means, norms, extremes of a ragged tensor: each rank reduces its own elements, then the ranks agree.

    x (6, 4), rows cut 1 : 2          x.sum(1)    stays cut: the rows are whole on their rank
                                      x.sum(0)    due for a sum over the ranks: Partial("sum")
                                      x.sum()     one number, the same on every rank: Replicate()

Sums and norms of several results each are left partial, as torch leaves them. A single number and all extremes are
agreed on at once. A reduction of some but not all dims that are cut as one raises.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_dtensor._torch import DTensorSpec, OutputSharding, TensorMeta
from ragged_dtensor.along_dim import along_dim
from ragged_dtensor.contributions import (
    Kind,
    agreed,
    count_kind,
    extreme_kind,
    local_maxima,
    local_norms,
    mean_kind,
    norm_kind,
    prod_kind,
    sum_kind,
    truth_kind,
    wide_dtype,
)
from ragged_dtensor.elementwise import num_flat_or_none
from ragged_dtensor.op_call import Answer, Local, OpCall, as_dtype, dtype_of, local_dims, refusal, replicated, spec_like
from ragged_dtensor.placement import RaggedShard

REDUCTIONS = {
    "all",
    "amax",
    "amin",
    "any",
    "count_nonzero",
    "linalg_vector_norm",
    "max",
    "mean",
    "min",
    "nansum",
    "norm",
    "prod",
    "sum",
}

# Of which the ranks' results add up, as they are, to that of the whole.
LINEAR = {"nansum", "sum"}


@dataclass(frozen=True)
class Extent:
    """Which dims a reduction takes away from a tensor whose first `flat` dims are cut as one."""

    dims: tuple[int, ...]
    flat: int
    keepdim: bool

    @property
    def crosses(self) -> bool:
        """Whether the cut dims are reduced, so that the ranks have to agree."""
        return 0 in self.dims or not self.flat

    @property
    def local_dims(self) -> tuple[int, ...]:
        return local_dims(self.dims, self.flat) if self.dims else (0,)

    def result_placement(self, placement: Placement, partial: Placement) -> Placement:
        """What becomes of a placement: `partial` where its dim is reduced."""
        if isinstance(placement, RaggedShard):
            return partial if self.crosses else placement
        if isinstance(placement, Shard):
            if placement.dim in self.dims:
                return partial
            return Shard(placement.dim - (0 if self.keepdim else sum(dim < placement.dim for dim in self.dims)))
        return placement


def reduced(call: OpCall) -> Answer:
    """One reduction over all dims, over all cut dims and any others, or over dims that are not cut."""
    if call.name in ("max", "min") and call.op._overloadname != "default":
        return along_dim(call)
    if call.name in ("max", "min") and not math.prod(call.spec.shape):
        raise refusal(call, "a tensor without elements has no largest or smallest one")
    extent = _extent(call)
    meta = call.metas[0]
    kind = _kind(call, extent, meta)
    _check_partial(call)
    # A single number is agreed on at once, so that `item()` says the same on every rank.
    partial = kind.partial if math.prod(meta.shape) > 1 else None
    placements = [extent.result_placement(p, partial or Replicate()) for p in call.spec.placements]
    spec = spec_like(call.spec, placements, meta)
    axes = reduced_axes(call.spec, extent)
    if extent.flat == 1 and (not axes or (partial is not None and call.name in LINEAR)):
        return OutputSharding(spec)  # with one flat dim, the op itself does it: local dims have the names of full ones
    axes = () if partial is not None else axes
    return Local(spec, functools.partial(_compute, kind, extent, call.mesh, axes, meta.dtype))


def _extent(call: OpCall) -> Extent:
    rank = len(call.spec.shape)
    given = call.argument("dim")
    keepdim = bool(call.argument("keepdim", False))
    if given is None or (isinstance(given, list | tuple) and not given and call.name not in ("any", "all")):
        dims = tuple(range(rank))
    else:
        given = given if isinstance(given, list | tuple) else [given]
        dims = tuple(sorted({dim % rank if rank else 0 for dim in given})) if rank else ()
    flat = num_flat_or_none(tuple(call.spec.placements)) or 0
    cut = set(range(flat))
    if cut & set(dims) and not cut <= set(dims):
        raise refusal(call, f"it reduces dims {dims}, but dims {tuple(sorted(cut))} are cut as one; reduce all or none")
    if rank and not dims:
        raise refusal(call, "it reduces no dim")
    return Extent(dims, flat, keepdim)


def _kind(call: OpCall, extent: Extent, meta: TensorMeta) -> Kind:
    dtype = call.argument("dtype")
    match call.name:
        case "sum":
            return sum_kind(torch.sum, dtype)
        case "nansum":
            return sum_kind(torch.nansum, dtype)
        case "mean":
            return mean_kind(math.prod(call.spec.shape[dim] for dim in extent.dims), meta.dtype)
        case "prod":
            return prod_kind(dtype)
        case "count_nonzero":
            return count_kind()
        case "any" | "all":
            return truth_kind(is_any=call.name == "any")
        case "linalg_vector_norm" | "norm":
            return norm_kind(_order(call), dtype_of(call.spec), dtype)
        case _:
            return extreme_kind(is_max="max" in call.name)


def _order(call: OpCall) -> float:
    order = call.argument("ord" if call.name == "linalg_vector_norm" else "p")
    return 2.0 if order is None else float(order)


def _check_partial(call: OpCall) -> None:
    """A sum that is still due may be summed, nothing else."""
    due = [p for p in call.spec.placements if isinstance(p, Partial)]
    if due and not (call.name in ("sum", "mean") and all(p.reduce_op in ("sum", "avg") for p in due)):
        raise refusal(call, "a value that is still to be reduced would go through it before the reduction")


def reduced_axes(spec: DTensorSpec, extent: Extent) -> tuple[int, ...]:
    """Mesh axes whose ranks hold parts of what is reduced."""
    return tuple(
        axis
        for axis, placement in enumerate(spec.placements)
        if (isinstance(placement, RaggedShard) and extent.crosses)
        or (isinstance(placement, Shard) and placement.dim in extent.dims)
    )


def _compute(
    kind: Kind,
    extent: Extent,
    mesh: DeviceMesh,
    axes: Sequence[int],
    dtype: torch.dtype,
    local: torch.Tensor,
    /,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    result = agreed(kind.local(local, extent.local_dims), mesh, axes, kind.agree).to(dtype)
    if not extent.keepdim:
        return result
    kept = [1 if dim in extent.local_dims else size for dim, size in enumerate(local.shape)]
    if extent.crosses:
        kept[:1] = [1] * extent.flat
    return result.reshape(kept)


# --- lists

FOREACH_REDUCTIONS = {"_foreach_max", "_foreach_norm"}


def reduced_lists(call: OpCall) -> Answer:
    """The norm or the maximum of each tensor of a list; the ranks agree on all of them in one all-reduce a mesh."""
    operands = [operand.spec for operand in call.operands]
    if any(isinstance(p, Partial) for spec in operands for p in spec.placements):
        raise refusal(call, "some of the tensors are still to be reduced")
    specs = [spec_like(spec, replicated(spec.mesh), meta) for spec, meta in zip(operands, call.metas, strict=True)]
    dtypes = tuple(meta.dtype for meta in call.metas)
    kinds = [_list_kind(call, spec) for spec in operands]
    groups: dict[tuple[Any, ...], list[int]] = {}
    is_norm = call.name == "_foreach_norm"
    for index, (spec, kind, dtype) in enumerate(zip(operands, kinds, dtypes, strict=True)):
        wide = wide_dtype(dtype) if is_norm else dtype
        groups.setdefault((spec.mesh, reduced_axes(spec, _whole_extent(spec)), kind.agree, wide), []).append(index)
    together = tuple(_Together(mesh, axes, how, tuple(indices)) for (mesh, axes, how, _), indices in groups.items())
    local = functools.partial(local_norms, _list_order(call)) if is_norm else local_maxima
    return Local(specs, functools.partial(_compute_list, local, together, dtypes))


@dataclass(frozen=True)
class _Together:
    """The tensors of a list whose results the ranks agree on at once."""

    mesh: DeviceMesh
    axes: tuple[int, ...]
    how: str
    indices: tuple[int, ...]


def _list_kind(call: OpCall, spec: DTensorSpec) -> Kind:
    if call.name == "_foreach_max":
        return extreme_kind(is_max=True)
    return norm_kind(_list_order(call), dtype_of(spec), call.argument("dtype"))


def _list_order(call: OpCall) -> float:
    order = call.argument("ord")
    return 2.0 if order is None else float(order)


def _whole_extent(spec: DTensorSpec) -> Extent:
    return Extent(tuple(range(len(spec.shape))), num_flat_or_none(tuple(spec.placements)) or 0, keepdim=False)


def _compute_list(
    local: Callable[..., list[torch.Tensor]],
    together: Sequence[_Together],
    dtypes: Sequence[torch.dtype],
    locals_: Sequence[torch.Tensor],
    /,
    *args: Any,
    **kwargs: Any,
) -> list[torch.Tensor]:
    results = local(locals_, dtypes)
    for group in together:
        stacked = torch.stack([results[index] for index in group.indices])
        agreed_on = agreed(stacked, group.mesh, group.axes, group.how)
        for index, value in zip(group.indices, agreed_on.unbind(), strict=True):
            results[index] = as_dtype(value, dtypes[index])
    return results
