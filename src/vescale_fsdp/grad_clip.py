"""Gradient norm and clipping over any mix of meshes, placements and plain tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from . import _torch

__all__ = ["clip_grad_norm_", "get_total_norm"]

Axes = tuple[tuple[int, ...], ...]
"""The ranks of each process group over which a tensor is cut: what its norm has to be summed over."""


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most `max_norm`; returns the norm before, a plain tensor.

    The norm is that of all parameters together, each counted once however often it is replicated, and the same on every
    rank. With `error_if_nonfinite`, every rank raises before any gradient changes. Costs one small all-reduce per axis.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [param.grad for param in given if param.grad is not None]
    total = get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
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
    """The norm of all tensors together, equal on every rank that holds a part of them."""
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    norm_type = float(norm_type)
    by_axes: dict[Axes, list[torch.Tensor]] = defaultdict(list)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for tensor in given:
        by_axes[_axes(tensor, groups)].append(_local(tensor))
    with torch.no_grad():
        parts = [_reduced(by_axes[axes], [groups[ranks] for ranks in axes], norm_type) for axes in sorted(by_axes)]
        total = _combined(parts, norm_type)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is {total.item()}, so it cannot be clipped to. No "
            f"gradient was changed. Set error_if_nonfinite=False to clip anyway."
        )
    return total


def _axes(tensor: torch.Tensor, groups: dict[tuple[int, ...], dist.ProcessGroup]) -> Axes:
    """The rank sets over which `tensor` is cut; `groups` learns the process group of each."""
    if not isinstance(tensor, DTensor):
        return ()
    axes = []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate) or tensor.device_mesh.size(axis) == 1:
            continue
        if placement.is_partial():
            raise NotImplementedError(
                f"a gradient with placements {tensor.placements} is unreduced; redistribute it first"
            )
        group = tensor.device_mesh.get_group(axis)
        ranks = tuple(dist.get_process_group_ranks(group))
        groups[ranks] = group
        axes.append(ranks)
    return tuple(axes)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _reduced(tensors: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup], norm_type: float) -> torch.Tensor:
    """Sum of |x|^p (for p = inf: the maximum) over the tensors' parts on all ranks of the groups."""
    filled = [tensor for tensor in tensors if tensor.numel() > 0]
    device = tensors[0].device
    if filled:
        norms = torch.stack([norm.to(device, torch.float64) for norm in _torch.foreach_norm(filled, norm_type)])
    else:
        norms = torch.zeros(1, dtype=torch.float64, device=device)
    part = norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()
    for group in groups:
        dist.all_reduce(part, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)
    return part


def _combined(parts: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    if not parts:
        return torch.tensor(0.0)
    stacked = torch.stack([part.to(parts[0].device) for part in parts])
    total = stacked.max() if math.isinf(norm_type) else stacked.sum().pow(1 / norm_type)
    return total.to(torch.float32)
