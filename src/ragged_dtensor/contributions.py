"""What one rank contributes to a reduction, and how the ranks make one value of it.

Ranks without elements contribute what changes nothing: 0 to a sum, -inf to a maximum. Extremes are agreed on in one
all-reduce that carries NaN separately, because the max of a backend forgets it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement

from ragged_dtensor import _torch
from ragged_dtensor._torch import wait
from ragged_dtensor.collectives import Axis


@dataclass(frozen=True)
class Kind:
    """How local results become one: brought together as `agree` says, or left `partial` where that is allowed."""

    local: Callable[..., torch.Tensor]
    agree: str
    partial: Placement | None = None


# --- kinds


def sum_kind(total: Callable[..., torch.Tensor], dtype: torch.dtype | None) -> Kind:
    return Kind(functools.partial(_total, total, dtype), "sum", Partial("sum"))


def mean_kind(numel: int, dtype: torch.dtype) -> Kind:
    """The mean of `numel` elements on all ranks, not the mean of the ranks' means."""
    return Kind(functools.partial(_mean, numel, dtype), "sum", Partial("sum"))


def prod_kind(dtype: torch.dtype | None) -> Kind:
    return Kind(functools.partial(_prod, dtype), "product", Partial("product"))


def count_kind() -> Kind:
    return Kind(torch.count_nonzero, "sum", Partial("sum"))


def truth_kind(*, is_any: bool) -> Kind:
    return Kind(functools.partial(_truth, is_any), "max" if is_any else "min")


def extreme_kind(*, is_max: bool) -> Kind:
    return Kind(functools.partial(_extreme, is_max), "max" if is_max else "min")


def norm_kind(order: float, operand: torch.dtype, dtype: torch.dtype | None) -> Kind:
    """The p-norm: the root of the sum of the ranks' norms to the power p; the largest or smallest for infinite p."""
    wide = wide_dtype(dtype or operand)
    if math.isinf(order):
        return Kind(functools.partial(_norm, order, dtype), "max" if order > 0 else "min")
    if order == 0:
        return Kind(functools.partial(_norm, 0.0, dtype), "sum", Partial("sum"))
    # Squares of float16 norms overflow on their way to the other ranks: these are never left partial.
    partial = None if (dtype or operand) == torch.float16 else _torch.norm_partial(order)
    return Kind(functools.partial(_norm, order, wide), f"root {order}", partial)


def wide_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to sum in; None for that of the operand."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype if dtype.is_floating_point else None


# --- what one rank computes


def _total(total: Callable[..., torch.Tensor], dtype: Any, local: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    result: torch.Tensor = total(local, dims, dtype=dtype)
    return result


def _mean(numel: int, dtype: torch.dtype, local: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    wide = wide_dtype(dtype)
    return torch.sum(local, dims, dtype=wide) / numel if numel else torch.sum(local, dims, dtype=wide) * math.nan


def _prod(dtype: Any, local: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    for dim in sorted(dims, reverse=True):
        local = torch.prod(local, dim, dtype=dtype)
    return local


def _truth(is_any: bool, local: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return _extreme(is_any, local != 0, dims)


def _norm(order: float, dtype: Any, local: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    if math.isinf(order):
        return _extreme(order > 0, local.abs() if dtype is None else local.to(dtype).abs(), dims)
    if order < 0 and not local.numel():
        nothing = torch.linalg.vector_norm(local, 1, dims, dtype=dtype)
        return torch.full_like(nothing, math.inf)
    result: torch.Tensor = torch.linalg.vector_norm(local, order, dims, dtype=dtype)
    return result


def local_norms(order: float, locals_: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """The norm of each local tensor in a dtype wide enough to be summed; one fused call for those with elements."""
    wide = {wide_dtype(dtype) for dtype in dtypes}
    if len(wide) == 1 and all(local.numel() for local in locals_):
        return _torch.norms(locals_, order, *wide)
    nothing = math.inf if order < 0 else 0.0
    norms = [local.new_full((), nothing, dtype=wide_dtype(dtype)) for local, dtype in zip(locals_, dtypes, strict=True)]
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, (local, norm) in enumerate(zip(locals_, norms, strict=True)):
        if local.numel():
            by_dtype.setdefault(norm.dtype, []).append(index)
    for dtype, indices in by_dtype.items():
        found = _torch.norms([locals_[index] for index in indices], order, dtype)
        for index, norm in zip(indices, found, strict=True):
            norms[index] = norm
    return norms


def local_maxima(locals_: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    return [_extreme(True, local, tuple(range(local.ndim))) for local in locals_]


def _extreme(is_max: bool, local: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The largest or smallest element, or for none the value that leaves every other one standing."""
    if all(local.shape[dim] for dim in dims):
        return (torch.amax if is_max else torch.amin)(local, dims)
    shape = [size for dim, size in enumerate(local.shape) if dim not in dims]
    return local.new_full(shape, neutral(is_max, local.dtype))


def neutral(is_max: bool, dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return not is_max
    if dtype.is_floating_point:
        return -math.inf if is_max else math.inf
    return torch.iinfo(dtype).min if is_max else torch.iinfo(dtype).max


# --- what the ranks agree on


def agreed(local: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int], how: str) -> torch.Tensor:
    """All ranks' values as one: "sum", "product", "max", "min", or "root p" of the sum of powers p. NaN wins."""
    if not any(mesh.size(axis) > 1 for axis in axes):
        return local
    if how.startswith("root "):
        order = float(how.removeprefix("root "))
        return _all_reduced(local**order, mesh, axes, "sum") ** (1 / order)
    if local.dtype == torch.bool:
        return agreed(local.to(torch.uint8), mesh, axes, how).to(torch.bool)
    if how in ("sum", "product") or not local.dtype.is_floating_point:
        return _all_reduced(local, mesh, axes, how)
    is_nan = local.isnan()
    sign = 1 if how == "max" else -1
    both = torch.stack([(sign * local).masked_fill(is_nan, -math.inf), is_nan.to(local.dtype)])
    value, any_nan = _all_reduced(both, mesh, axes, "max").unbind()
    return (sign * value).masked_fill(any_nan > 0, math.nan)


def _all_reduced(local: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int], reduce_op: str) -> torch.Tensor:
    for axis in axes:
        if mesh.size(axis) > 1:
            local = wait(Axis(mesh, axis).all_reduce(local, reduce_op))
    return local
