"""Gradient norm and clipping over any mix of meshes, placements and plain tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from . import _torch

__all__ = ["clip_grad_norm_", "get_total_norm"]


@dataclass(frozen=True)
class _Cut:
    """A tensor's part on this rank, and the process groups over whose ranks the tensor is cut."""

    local: torch.Tensor
    groups: tuple[dist.ProcessGroup, ...]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most `max_norm`; returns the norm before, a plain tensor.

    The norm is that of all parameters together, each counted once however often it is replicated, and the same on every
    rank. With `error_if_nonfinite`, every rank raises before any gradient changes. Costs one small all-reduce for each
    process group over which anything is cut, also where a parameter has no gradient on this rank alone.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [param.grad for param in given if param.grad is not None]
    # Parameters without a gradient count too: other ranks may have one, and wait for this rank.
    cuts = [_cut_of_grad(param) for param in given if param.requires_grad or param.grad is not None]
    total = _total_norm(cuts, float(norm_type), error_if_nonfinite)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for grad in grads:
            local = _local(grad)
            by_kind[(local.device, local.dtype)].append(local)
        for (device, _), locals_ in by_kind.items():
            _torch.foreach_mul_(locals_, scale.to(device))
    return total


def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The norm of all tensors together, equal on every rank; all ranks give the same list, each with its parts."""
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return _total_norm([_cut_of(tensor) for tensor in given], float(norm_type), error_if_nonfinite)


def _cut_of_grad(param: torch.Tensor) -> _Cut:
    """Nothing, cut as the parameter is, where it has no gradient."""
    if param.grad is not None:
        return _cut_of(param.grad)
    cut = _cut_of(param)
    return _Cut(cut.local.new_empty(0), cut.groups)


def _cut_of(tensor: torch.Tensor) -> _Cut:
    if not isinstance(tensor, DTensor):
        return _Cut(tensor.detach(), ())
    groups = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise NotImplementedError(
                f"a gradient with placements {tensor.placements} is unreduced; redistribute it first"
            )
        if not isinstance(placement, Replicate) and tensor.device_mesh.size(axis) > 1:
            groups.append(tensor.device_mesh.get_group(axis))
    return _Cut(_local(tensor), tuple(groups))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return _torch.local_of(tensor).detach() if isinstance(tensor, DTensor) else tensor


def _total_norm(cuts: Sequence[_Cut], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    if not cuts:
        return torch.tensor(0.0)
    with torch.no_grad():
        total = _summed(cuts, norm_type)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is {total.item()}, so it cannot be clipped to. No "
            f"gradient was changed. Set error_if_nonfinite=False to clip anyway."
        )
    return total


def _summed(cuts: Sequence[_Cut], norm_type: float) -> torch.Tensor:
    """Sum of |x|^p (for p = inf: the maximum) of what is cut alike, over the ranks that it is cut over; then of all.

    Groups are taken in the order in which tensors name them, which is the same on all ranks; their ranks are not.
    """
    alike: dict[tuple[str, ...], list[_Cut]] = defaultdict(list)
    for cut in cuts:
        alike[tuple(group.group_name for group in cut.groups)].append(cut)
    device = cuts[0].local.device
    parts = torch.stack([_powers([cut.local for cut in each], norm_type).to(device) for each in alike.values()])
    groups = {group.group_name: group for cut in cuts for group in cut.groups}
    for name, group in groups.items():
        cut_there = torch.tensor([name in names for names in alike], device=device)
        parts[cut_there] = _all_reduced(parts[cut_there], group, norm_type)
    total = parts.max() if math.isinf(norm_type) else parts.sum().pow(1 / norm_type)
    return total.to(torch.float32)


def _all_reduced(parts: torch.Tensor, group: dist.ProcessGroup, norm_type: float) -> torch.Tensor:
    if not math.isinf(norm_type):
        dist.all_reduce(parts, dist.ReduceOp.SUM, group=group)
        return parts
    # Which of a number and NaN is the greater depends on the backend, and on their order.
    is_nan = parts.isnan()
    both = torch.stack([parts.masked_fill(is_nan, 0.0), is_nan.to(parts.dtype)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return both[0].masked_fill(both[1] > 0, math.nan)


def _powers(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Of this rank's parts, in float64."""
    filled = [tensor for tensor in tensors if tensor.numel() > 0]
    device = tensors[0].device
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([norm.to(device, torch.float64) for norm in _torch.foreach_norm(filled, norm_type)])
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()
