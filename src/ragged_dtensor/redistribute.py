"""Moving a DTensor between placements of which at least one is ragged: a table of rules, one movement each.

    from \\ to      Replicate            ragged, Shard(d)
    Replicate       -                    slice, no communication
    ragged, Shard   all-gather           all-to-all of the elements that change rank
    Partial         all-reduce           reduce-scatter

Shards of equal size use the equal-size collectives; a source with one owner broadcasts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from ragged_dtensor import _torch
from ragged_dtensor._torch import DTensorSpec, wait
from ragged_dtensor.collectives import Axis
from ragged_dtensor.errors import LayoutError, UnsupportedTransitionError
from ragged_dtensor.layout import Piece, Shape
from ragged_dtensor.ownership import Placements, coordinate_of, piece_of
from ragged_dtensor.transition import Movement, Packing, Region, Step, find_movements


def redistribute_local(
    local: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, *, async_op: bool = False
) -> torch.Tensor:
    """This rank's local tensor under the target placements. The answer to torch's redistribute for ragged tensors.

    Raises LayoutError if the placements do not fit the shape, UnsupportedTransitionError if there is no way.
    """
    mesh, source, target = current_spec.mesh, current_spec.placements, target_spec.placements
    if mesh != target_spec.mesh:
        raise UnsupportedTransitionError(
            f"{source} on {mesh} cannot move to {target} on another mesh, {target_spec.mesh}."
        )
    if source == target or mesh.get_coordinate() is None:
        return local
    _torch.check_partials(source, target)
    if _torch.has_torch_order(current_spec) or _torch.has_torch_order(target_spec):
        return _through_replicate(local, current_spec, target_spec)
    shape, coordinate = tuple(current_spec.shape), coordinate_of(mesh)
    expected, movements = find_movements(shape, source, target, tuple(mesh.shape), coordinate)
    if tuple(local.shape) != expected:
        raise _other_local_shape(local, shape, source, coordinate, expected)
    for movement in movements:
        local = _apply(movement, Axis(mesh, movement.step.axis), wait(local))
    if not async_op:
        local = wait(local)
    return local if any(map(_torch.seams.is_ragged, target)) else _torch.with_stride_order(local, target_spec)


def check_local_shape(local: torch.Tensor, shape: Sequence[int], placements: Placements, mesh: DeviceMesh) -> None:
    """Raise LayoutError unless `local` has the shape that the placements give this rank."""
    coordinate = coordinate_of(mesh)
    expected = piece_of(shape, placements, tuple(mesh.shape), coordinate).local_shape
    if tuple(local.shape) != expected:
        raise _other_local_shape(local, tuple(shape), placements, coordinate, expected)


def _other_local_shape(
    local: torch.Tensor, shape: Shape, placements: Placements, coordinate: Shape, expected: Shape
) -> LayoutError:
    return LayoutError(
        f"The rank at {coordinate} holds a tensor of shape {tuple(local.shape)}; {placements} of a tensor of shape "
        f"{shape} gives it {expected}. Uneven Shard(d) must follow torch.chunk; cuts of any other size are what "
        "RaggedShard is for."
    )


def _through_replicate(local: torch.Tensor, current: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """Torch's strided shards and shard orders are read and written by torch alone.

    A ragged placement beside them cuts inside the part that they leave on a rank: it goes first and comes last.
    """
    middle = DTensorSpec(current.mesh, (Replicate(),) * current.mesh.ndim, tensor_meta=current.tensor_meta)
    before, after = _Nested.of(current), _Nested.of(target)
    if before is not None:
        local, current = redistribute_local(local, before.cut, before.whole), before.outer
    local = _torch.redistribute(local, current, middle)
    if after is None:
        return _torch.redistribute(local, middle, target)
    return redistribute_local(_torch.redistribute(local, middle, after.outer), after.whole, after.cut)


def check_parts(spec: DTensorSpec) -> None:
    """Raise LayoutError if a ragged placement would cut inside parts of unequal size that torch's own leave."""
    _Nested.of(spec)


@dataclass(frozen=True)
class _Nested:
    """A ragged cut inside the part that torch's own placements leave: `outer` gives the part, `cut` the share of it."""

    outer: DTensorSpec
    cut: DTensorSpec
    whole: DTensorSpec

    @classmethod
    def of(cls, spec: DTensorSpec) -> _Nested | None:
        """None where torch's order and ragged placements do not meet. Raises LayoutError for parts of unequal size."""
        is_ragged = _torch.seams.is_ragged
        if not _torch.has_torch_order(spec) or not any(map(is_ragged, spec.placements)):
            return None
        mesh, meta = spec.mesh, spec.tensor_meta
        outer = DTensorSpec(mesh, tuple(Replicate() if is_ragged(p) else p for p in spec.placements), tensor_meta=meta)
        shape = _torch.local_shape(outer)
        parts = math.prod(size for size, p in zip(mesh.shape, outer.placements, strict=True) if not p.is_replicate())
        if math.prod(shape) * parts != math.prod(spec.shape):
            raise LayoutError(
                f"{spec.placements} leave parts of unequal size of {tuple(spec.shape)} on {mesh}, inside which no "
                "ragged placement can cut. Redistribute to Shard, which StridedRaggedShard cuts inside, first."
            )
        inner = tuple(p if is_ragged(p) else Replicate() for p in spec.placements)
        assert meta is not None
        part = _torch.TensorMeta(torch.Size(shape), _torch.contiguous_stride(shape), meta.dtype)
        replicas = (Replicate(),) * mesh.ndim
        return cls(outer, *(DTensorSpec(mesh, each, tensor_meta=part) for each in (inner, replicas)))


def place_replica(local: torch.Tensor, shape: Shape, step: Step, mesh: DeviceMesh, source: int | None) -> torch.Tensor:
    """What `distribute_tensor` does on one axis, which goes from Replicate to `step.target`.

    source: the rank along the axis whose data counts, or None for everyone's own.
    """
    movement, local = Movement(shape, step, tuple(mesh.shape), coordinate_of(mesh)), local.contiguous()
    axis = Axis(mesh, step.axis)
    sends = source is not None and not local.is_meta
    if kind_of(step.target) is Kind.SHARD:
        return (
            scatter(movement, axis, local, source)
            if source is not None and sends
            else slice_local(movement, axis, local)
        )
    if source is not None and sends and axis.size > 1 and local.numel():
        local = axis.broadcast(local.flatten(), source, local.numel()).view(local.shape)
    if kind_of(step.target) is Kind.PARTIAL:
        return _torch.partition_partial(step.target, local, mesh, step.axis)
    return local


class Kind(enum.Enum):
    """What a placement says about the elements of a rank along one axis."""

    REPLICATE = enum.auto()
    PARTIAL = enum.auto()
    SHARD = enum.auto()


def kind_of(placement: Placement) -> Kind:
    if isinstance(placement, Replicate):
        return Kind.REPLICATE
    return Kind.PARTIAL if isinstance(placement, Partial) else Kind.SHARD


def _apply(movement: Movement, axis: Axis, local: torch.Tensor) -> torch.Tensor:
    rule = RULES[kind_of(movement.step.source), kind_of(movement.step.target)]
    return rule(movement, axis, local.contiguous())


def slice_local(movement: Movement, axis: Axis, local: torch.Tensor) -> torch.Tensor:
    """Replicate -> shard: a copy, so that the full tensor can be freed."""
    kept = pack(local, movement.kept)
    return (kept.clone() if movement.kept.is_memory else kept).view(movement.result.local_shape)


def gather(movement: Movement, axis: Axis, local: torch.Tensor) -> torch.Tensor:
    """Shard -> Replicate."""
    numels, flat = movement.numels_before, local.flatten()
    owners = [rank for rank, numel in enumerate(numels) if numel]
    if axis.size == 1 or not owners:
        buffer = flat
    elif len(owners) == 1:
        buffer = axis.broadcast(flat, owners[0], numels[owners[0]])
    elif len(set(numels)) == 1:
        buffer = axis.all_gather(flat)
    else:
        buffer = axis.all_gather_unequal(flat, numels)
    return unpack(buffer, movement.transfer.receive, movement.result)


def exchange(movement: Movement, axis: Axis, local: torch.Tensor) -> torch.Tensor:
    """Shard -> another shard."""
    transfer = movement.transfer
    buffer = pack(local, transfer.send)
    if not transfer.moves_nothing:
        buffer = axis.exchange(buffer, received=transfer.receive.splits, sent=transfer.send.splits)
    return unpack(buffer, transfer.receive, movement.result)


def reduce_scatter(movement: Movement, axis: Axis, local: torch.Tensor) -> torch.Tensor:
    """Partial -> shard."""
    numels, flat = movement.numels_after, pack(local, movement.transfer.send)
    reduce_op = movement.step.source.reduce_op  # type: ignore[attr-defined]
    if axis.size == 1 or not sum(numels):
        shard = flat
    elif len(set(numels)) == 1:
        shard = axis.reduce_scatter(flat, reduce_op)
    else:
        shard = axis.reduce_scatter_unequal(flat, numels, reduce_op)
    return shard.view(movement.result.local_shape)


def scatter(movement: Movement, axis: Axis, local: torch.Tensor, source: int) -> torch.Tensor:
    """The shard of this rank, from the replica of rank `source` of the axis."""
    numels = movement.numels_after
    if axis.size == 1 or not sum(numels):
        return slice_local(movement, axis, local)
    nothing = [0] * axis.size
    received = [numels[movement.rank] if rank == source else 0 for rank in range(axis.size)]
    if movement.rank == source:
        buffer = axis.exchange(pack(local, movement.transfer.send), received=received, sent=numels)
    else:
        buffer = axis.exchange(local.new_empty(0), received=received, sent=nothing)
    return wait(buffer).view(movement.result.local_shape)


def all_reduce(movement: Movement, axis: Axis, local: torch.Tensor) -> torch.Tensor:
    """Partial -> Replicate, by the placement's own rule."""
    return _torch.reduce_partial(movement.step.source, local, axis.mesh, axis.axis)


RULES: dict[tuple[Kind, Kind], Callable[[Movement, Axis, torch.Tensor], torch.Tensor]] = {
    (Kind.REPLICATE, Kind.SHARD): slice_local,
    (Kind.SHARD, Kind.REPLICATE): gather,
    (Kind.SHARD, Kind.SHARD): exchange,
    (Kind.PARTIAL, Kind.SHARD): reduce_scatter,
    (Kind.PARTIAL, Kind.REPLICATE): all_reduce,
}


def pack(local: torch.Tensor, packing: Packing) -> torch.Tensor:
    """The parts of a contiguous tensor one after the other; the tensor's own memory where that is already so."""
    flat = local.flatten()
    if packing.is_memory:
        return flat
    if len(packing.regions) == 1 and packing.regions[0].is_flat:
        return _part(flat, packing.regions[0]).clone()
    buffer = flat.new_empty(sum(packing.splits))
    for part, region in zip(
        _torch.split(buffer, [region.numel for region in packing.regions]), packing.regions, strict=True
    ):
        part.view(region.sizes).copy_(_part(flat, region))
    return buffer


def unpack(buffer: torch.Tensor, packing: Packing, piece: Piece) -> torch.Tensor:
    """The inverse of `pack`: a local tensor of the piece's shape."""
    if packing.is_memory:
        return buffer.view(piece.local_shape)
    buffer = wait(buffer)
    flat = buffer.new_empty(packing.numel)
    for part, region in zip(
        _torch.split(buffer, [region.numel for region in packing.regions]), packing.regions, strict=True
    ):
        _part(flat, region).copy_(part.view(region.sizes))
    return flat.view(piece.local_shape)


def _part(flat: torch.Tensor, region: Region) -> torch.Tensor:
    if region.is_flat:
        return flat.narrow(0, region.start, region.numel).view(region.sizes)
    return flat.as_strided(region.sizes, region.strides, flat.storage_offset() + region.start)


_torch.seams.redistribute = redistribute_local
