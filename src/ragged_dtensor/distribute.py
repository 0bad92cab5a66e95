"""Making ragged DTensors: `distribute_tensor` from a full tensor, `from_local` from the pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ragged_dtensor import _torch
from ragged_dtensor._torch import DTensorSpec, TensorMeta
from ragged_dtensor.errors import LayoutError, RaggedShardError
from ragged_dtensor.layout import Shape
from ragged_dtensor.ownership import Placements, application_order, coordinate_of
from ragged_dtensor.placement import RaggedShard
from ragged_dtensor.redistribute import check_local_shape, check_parts, place_replica
from ragged_dtensor.transition import Step


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """A full tensor as a DTensor, ragged or not; the signature and meaning of torch's function.

    src_data_rank: whose data counts on each mesh axis, 0 by default. None takes this rank's own and sends nothing.

    Raises LayoutError if the placements do not fit the tensor.
    """
    return torch_distribute(tensor, device_mesh, placements, src_data_rank=src_data_rank)


def distribute_ragged(
    tensor: torch.Tensor, device_mesh: DeviceMesh | None, placements: Sequence[Placement], *, src_data_rank: int | None
) -> DTensor:
    """What torch's `distribute_tensor` does when a placement is ragged."""
    mesh = _torch.current_mesh(device_mesh)
    placed = _normalized(placements, tensor.ndim)
    _check_source(tensor, mesh, placed)
    if isinstance(tensor, DTensor):
        return tensor
    if _torch.has_strided_shard(placed):
        return _beside_strided_shards(tensor, mesh, placed, src_data_rank)
    if tensor.device.type != mesh.device_type and not tensor.is_meta:
        tensor = tensor.to(mesh.device_type)
    meta = TensorMeta(tensor.size(), tensor.stride(), tensor.dtype)
    spec = DTensorSpec(mesh, placed, tensor_meta=meta)
    local = tensor.detach()
    if mesh.get_coordinate() is None:
        local = local.new_empty(0)
    else:
        done: list[Placement] = [Replicate()] * mesh.ndim
        for axis in application_order(placed):
            before, done[axis] = tuple(done), placed[axis]
            step = Step(axis, before, tuple(done))
            local = place_replica(local, tuple(tensor.shape), step, mesh, src_data_rank)
    return _torch.new_dtensor(local.requires_grad_(tensor.requires_grad), spec, requires_grad=tensor.requires_grad)


def _beside_strided_shards(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements, src_data_rank: int | None
) -> DTensor:
    """What torch's own placements leave, then the ragged cuts inside it."""
    meta = TensorMeta(tensor.size(), tensor.stride(), tensor.dtype)
    check_parts(DTensorSpec(mesh, placements, tensor_meta=meta))
    outer = [Replicate() if isinstance(p, RaggedShard) else p for p in placements]
    with torch.no_grad():
        parts = torch_distribute(tensor.detach(), mesh, outer, src_data_rank=src_data_rank)
        cut = parts.redistribute(mesh, placements)
    cut.requires_grad_(tensor.requires_grad)
    return cut


def _normalized(placements: Sequence[Placement], ndim: int) -> Placements:
    return tuple(Shard(p.dim + ndim) if type(p) is Shard and p.dim < 0 else p for p in placements)


def _check_source(tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> None:
    if not tensor.is_leaf:
        raise RaggedShardError("distribute_tensor takes leaf tensors, got the result of an op. Detach it first.")
    _torch.check_partials(placements)
    if not isinstance(tensor, DTensor):
        return
    if tensor.device_mesh != mesh or tensor.placements != placements:
        raise RaggedShardError(
            f"Cannot distribute a DTensor placed as {tensor.placements} on {tensor.device_mesh} again as {placements} "
            f"on {mesh}. Call redistribute instead."
        )


def from_local(
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    run_check: bool = False,
) -> DTensor:
    """A DTensor around this rank's piece, as `DTensor.from_local`; differentiable.

    Without `shape`, it is computed from the units: a rank with u units of U and n rows sees n * U / u rows. That needs
    every rank to own something and `dims` of at most one dim, and is refused everywhere otherwise; `Shard(d)` on
    another axis counts as even, as in torch. `run_check` compares shapes across ranks. With `shape`, `stride` defaults
    to contiguous, and the local shape is checked.
    """
    mesh = _torch.current_mesh(device_mesh)
    placed = _normalized(placements if placements is not None else [Replicate()] * mesh.ndim, local_tensor.ndim)
    if not any(map(_torch.seams.is_ragged, placed)):
        full = None if shape is None else torch.Size(shape)
        strides = None if stride is None and full is None else tuple(stride or _torch.contiguous_stride(full or ()))
        return DTensor.from_local(local_tensor, mesh, placed, run_check=run_check, shape=full, stride=strides)
    full = torch.Size(global_shape(local_tensor, mesh, placed) if shape is None else shape)
    if mesh.get_coordinate() is not None:
        check_local_shape(local_tensor, full, placed, mesh)
    if run_check:
        _check_agreement(full, mesh)
    strides = tuple(stride) if stride is not None else _torch.contiguous_stride(full)
    return DTensor.from_local(local_tensor.contiguous(), mesh, placed, shape=full, stride=strides)


def global_shape(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Shape:
    """The full shape, from the local one and the units; the same verdict on every rank."""
    for placement in placements:
        if isinstance(placement, RaggedShard):
            _check_inferable(placement, placements)
    if mesh.get_coordinate() is None:
        return tuple(local.shape)
    shape = list(local.shape)
    for axis in reversed(application_order(tuple(placements))):
        placement, index = placements[axis], coordinate_of(mesh)[axis]
        if isinstance(placement, RaggedShard) and placement.dims:
            shape[0] = _all_rows(shape[0], placement, index)
        elif isinstance(placement, RaggedShard):
            shape = shape[1:]
        elif isinstance(placement, Shard):
            shape[placement.dim] *= mesh.size(axis)
    return tuple(shape)


def _check_inferable(placement: RaggedShard, placements: Sequence[Placement]) -> None:
    units = placement.local_units
    empty = len(units) - len(units.owners)
    if placement.num_flat > 1 or (placement.dims and empty):
        reason = f"{empty} of {len(units)} ranks own nothing" if empty else f"{placement.num_flat} dims are flattened"
        raise LayoutError(
            f"The shape of a tensor placed as {tuple(placements)} cannot be inferred from the pieces: {reason}. "
            "Pass shape= and stride=."
        )


def _all_rows(rows: int, placement: RaggedShard, index: int) -> int:
    units = placement.local_units
    if rows % units[index]:
        raise LayoutError(
            f"{rows} local rows are not a multiple of the {units[index]} units of rank {index} in {placement}. "
            "Pass shape= and stride=, or local tensors that follow the units."
        )
    return rows // units[index] * units.total


def _check_agreement(shape: torch.Size, mesh: DeviceMesh) -> None:
    """Every rank of the mesh says the same shape; compared along one axis after the other."""
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        found: list[object] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, tuple(shape), group=group)
        if len(set(found)) > 1:
            raise LayoutError(f"The ranks along mesh axis {axis} disagree on the shape of the tensor: {found}.")


_torch.seams.distribute = distribute_ragged
_torch.seams.global_shape = global_shape
