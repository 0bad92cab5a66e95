"""Which elements a rank owns under a tuple of placements: mesh coordinate in, `Piece` out."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_dtensor import _torch
from ragged_dtensor.errors import LayoutError, RaggedShardError
from ragged_dtensor.layout import Piece, Shape
from ragged_dtensor.placement import RaggedShard, StridedRaggedShard

Placements = tuple[Placement, ...]


def piece_of(
    shape: Sequence[int], placements: Sequence[Placement], mesh: Sequence[int], coordinate: Sequence[int]
) -> Piece:
    """What the rank at `coordinate` of a mesh of shape `mesh` owns of a tensor of `shape`.

    The same on every rank and checked for every rank: units that fit one piece but not another raise everywhere.
    """
    checked = _checked(tuple(shape), tuple(placements), tuple(mesh))
    return _piece(*checked, tuple(coordinate))


def pieces_along(
    shape: Sequence[int], placements: Sequence[Placement], axis: int, mesh: Sequence[int], coordinate: Sequence[int]
) -> list[Piece]:
    """What each rank along an axis owns, seen from `coordinate`."""
    checked = _checked(tuple(shape), tuple(placements), tuple(mesh))
    before, after = tuple(coordinate[:axis]), tuple(coordinate[axis + 1 :])
    # Past the cache: one big mesh would drive everything else out of it.
    return [_piece.__wrapped__(*checked, (*before, rank, *after)) for rank in range(mesh[axis])]


def local_piece(shape: Sequence[int], placements: Sequence[Placement], mesh: DeviceMesh) -> Piece:
    """What this rank owns."""
    return piece_of(shape, placements, tuple(mesh.shape), coordinate_of(mesh))


def coordinate_of(mesh: DeviceMesh) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RaggedShardError(f"This rank is not part of the mesh {mesh}.")
    return whole_coordinate(coordinate)


def whole_coordinate(coordinate: Sequence[object]) -> tuple[int, ...]:
    """The coordinate as integers, which simulated ranks do not have."""
    if not all(type(index) is int for index in coordinate):
        raise RaggedShardError(
            "Ragged shards differ in size from rank to rank, which one process that plays all ranks cannot hold, got "
            f"the mesh coordinate {coordinate}. Use one process per rank (gloo) instead of LocalTensorMode."
        )
    return tuple(coordinate)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def application_order(placements: Placements) -> tuple[int, ...]:
    """Mesh axes in the order in which their cuts are taken: left to right, strided cuts after the rest."""
    strided = [axis for axis, placement in enumerate(placements) if isinstance(placement, StridedRaggedShard)]
    return (*(axis for axis in range(len(placements)) if axis not in strided), *strided)


@functools.lru_cache(maxsize=4096)
def _checked(shape: Shape, placements: Placements, mesh: Shape) -> tuple[Shape, Placements, Shape]:
    """The arguments, once they are known to describe a layout on every rank."""
    if len(placements) != len(mesh):
        raise LayoutError(f"Expected one placement per mesh axis, got {len(placements)} for a mesh of shape {mesh}.")
    _check_each(shape, placements, mesh)
    _check_strides(placements, mesh)
    for coordinate in _distinct_coordinates(placements, mesh):
        _piece(shape, placements, mesh, coordinate)
    return shape, placements, mesh


def _check_each(shape: Shape, placements: Placements, mesh: Shape) -> None:
    ragged = [p for p in placements if isinstance(p, RaggedShard)]
    num_flat = max((p.num_flat for p in ragged), default=0)
    for axis, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):
            _check_ragged(placement, shape, mesh[axis])
        elif isinstance(placement, Shard):
            if not 0 <= placement.dim < len(shape):
                raise LayoutError(f"{placement} needs a dim of a tensor of shape {shape}.")
            if 0 < placement.dim < num_flat:
                raise LayoutError(
                    f"{placement} and {ragged[0]} cut the same dim {placement.dim} of a tensor of shape {shape}. "
                    f"Ragged dims must end before dim {placement.dim}: cut between whole rows of the sharded part."
                )
        elif not isinstance(placement, Replicate | Partial):
            raise LayoutError(f"{placement} on mesh axis {axis} cannot stand beside a ragged placement.")


def _check_ragged(placement: RaggedShard, shape: Shape, num_ranks: int) -> None:
    if placement.num_ranks != num_ranks:
        raise LayoutError(f"{placement} has units for {placement.num_ranks} ranks, the mesh axis has {num_ranks}.")
    if placement.num_flat > len(shape):
        raise LayoutError(
            f"{placement} flattens {placement.num_flat} dims, the tensor of shape {shape} has {len(shape)}."
        )
    if not placement.num_flat and shape:
        raise LayoutError(f"{placement} is for 0-dim tensors, got shape {shape}. Give it dims=(0,).")


def _check_strides(placements: Placements, mesh: Shape) -> None:
    for axis, placement in enumerate(placements):
        if not isinstance(placement, StridedRaggedShard):
            continue
        later = [mesh[i] for i in range(axis + 1, len(mesh)) if placements[i] == Shard(0)]
        if placement.split_factor != math.prod(later):
            raise LayoutError(
                f"{placement} on mesh axis {axis} has split_factor {placement.split_factor}; the later axes with "
                f"Shard(0) have {math.prod(later)} pieces."
            )


def _distinct_coordinates(placements: Placements, mesh: Shape) -> Iterator[tuple[int, ...]]:
    """One coordinate per outer piece: units are checked against rows, so the ragged axes themselves need no walk
    unless another ragged cut is nested in them."""
    num_ragged = sum(isinstance(p, RaggedShard) for p in placements)
    walked = [
        range(size) if isinstance(p, Shard) or (isinstance(p, RaggedShard) and num_ragged > 1) else range(1)
        for p, size in zip(placements, mesh, strict=True)
    ]
    return itertools.product(*walked)


@functools.lru_cache(maxsize=16384)
def _piece(shape: Shape, placements: Placements, mesh: Shape, coordinate: tuple[int, ...]) -> Piece:
    piece = longest = Piece.whole(shape)
    for axis in application_order(placements):
        placement, index = placements[axis], coordinate[axis]
        if isinstance(placement, RaggedShard):
            # Pieces of a Shard(0), of which the first is the longest, are cut at the same rows.
            cut = placement.num_flat, placement.local_units, index
            shared = longest if isinstance(placement, StridedRaggedShard) else None
            piece, longest = piece.cut(*cut, longest=shared), longest.cut(*cut)
        elif isinstance(placement, Shard):
            piece = piece.chunk(placement.dim, mesh[axis], index)
            longest = longest.chunk(placement.dim, mesh[axis], index if placement.dim else 0)
    return piece


def local_shape(shape: Shape, placements: Sequence[Placement], mesh: Shape, coordinate: Sequence[object]) -> Shape:
    return piece_of(shape, placements, mesh, whole_coordinate(coordinate)).local_shape


_torch.seams.local_shape = local_shape
