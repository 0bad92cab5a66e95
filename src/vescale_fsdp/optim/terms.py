"""The terms of a loan: where the tensors live, what every rank holds of every matrix, and who owns it for the step.

Tensors in, `Terms` out; all of it follows from placements and global shapes, so every rank arrives at the same.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ragged_dtensor.layout import Piece
from vescale_fsdp.errors import VescaleError

from .holdings import Holding, holding_of, piece_at
from .matrices import Matrix, matrices_of
from .owners import select_owners
from .route import Coordinate, Loan

__all__ = ["Place", "Replicas", "Terms", "ravel", "unravel"]

# From matrices, their owners, for each the rank that holds it whole or None, and the sizes of the travelled axes: other
# owners. Ranks are numbered row-major over these axes.
Reorder = Callable[[Sequence[Matrix], Sequence[int], Sequence[int | None], Coordinate], Sequence[int]]


class Replicas(Enum):
    """What ranks that hold the same matrices do: each replica computes all of them, or they share the work.

    Sharing costs one more all-to-all per bucket and replicated axis, which brings the results to the other replicas.
    """

    REPEAT = "repeat"
    SHARE = "share"


@dataclass(frozen=True)
class Place:
    """Where tensors live: their mesh, this rank's coordinate in it, and the axes that their matrices travel."""

    mesh: DeviceMesh | None
    coordinate: Coordinate
    axes: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensors: Sequence[Tensor], names: Sequence[str], replicas: Replicas) -> Place:
        """The one place of all tensors. Raises VescaleError when they are on different meshes."""
        if not tensors:
            return cls(None, (), (), torch.device("cpu"))
        mesh = _mesh_of(tensors[0])
        for name, tensor in zip(names, tensors, strict=True):
            if _mesh_of(tensor) != mesh:
                raise VescaleError(
                    f"{name}: expected a tensor on the mesh of {names[0]}, {mesh}, got {_mesh_of(tensor)}. "
                    "Lend tensors of one mesh together."
                )
        if mesh is None:
            return cls(None, (), (), tensors[0].device)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise VescaleError(f"{names[0]}: this rank is not part of its mesh, {mesh}.")
        axes = tuple(
            axis for axis in range(mesh.ndim) if mesh.size(axis) > 1 and _is_travelled(axis, tensors, replicas)
        )
        return cls(mesh, tuple(coordinate), axes, _local(tensors[0]).device)

    @property
    def sizes(self) -> Coordinate:
        return tuple(self.mesh.size(axis) for axis in self.axes) if self.mesh is not None else ()

    @property
    def here(self) -> Coordinate:
        """This rank's coordinate on the travelled axes."""
        return tuple(self.coordinate[axis] for axis in self.axes)

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def coordinates(self) -> itertools.product[Coordinate]:
        """Of all ranks among which matrices travel."""
        return itertools.product(*map(range, self.sizes))

    def piece(self, tensor: Tensor, coordinate: Coordinate) -> Piece:
        """What the rank at `coordinate` (of the travelled axes) holds."""
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return Piece.whole(shape)
        at = dict(zip(self.axes, coordinate, strict=True))
        full = tuple(at.get(axis, here) for axis, here in enumerate(self.coordinate))
        return piece_at(shape, tensor.placements, tuple(tensor.device_mesh.shape), full)

    def replicated(self, tensor: Tensor) -> frozenset[int]:
        """Which of the travelled axes (by position) hold the same of the tensor at all coordinates."""
        if not isinstance(tensor, DTensor):
            return frozenset()
        return frozenset(i for i, axis in enumerate(self.axes) if tensor.placements[axis].is_replicate())


@dataclass(frozen=True)
class Terms:
    """Every matrix as a `Loan`, the load of every rank, and the order in which axes are travelled outbound."""

    place: Place
    loans: tuple[Loan, ...]
    loads: tuple[int, ...]
    outbound: tuple[int, ...]

    @classmethod
    def of(
        cls,
        tensors: Sequence[Tensor],
        matrices: Sequence[Matrix],
        names: Sequence[str],
        *,
        replicas: Replicas,
        cost: Callable[[Matrix], int],
        owners: Sequence[int] | None = None,
        reorder: Reorder | None = None,
    ) -> Terms:
        place = Place.of(tensors, names, replicas)
        replicated = [place.replicated(tensor) for tensor in tensors]
        holdings = _holdings(tensors, matrices, place)
        costs = [cost(matrix) for matrix in matrices]
        held = [{ravel(at, place.sizes): run.numel for at, run in ranks.items()} for ranks in holdings]
        whole = [
            next(iter(ranks)) if len(ranks) == 1 and not replicated[matrix.tensor] else None
            for ranks, matrix in zip(held, matrices, strict=True)
        ]
        if owners is None:
            owners = select_owners(costs, place.num_ranks, held=held, whole=whole).owners
        if reorder is not None:
            owners = reorder(matrices, owners, whole, place.sizes)
        _check_owners(owners, len(matrices), place.num_ranks)
        loads = [0] * place.num_ranks
        for owner, price in zip(owners, costs, strict=True):
            loads[owner] += price
        loans = tuple(
            Loan(matrix, unravel(owner, place.sizes), held, replicated[matrix.tensor])
            for matrix, owner, held in zip(matrices, owners, holdings, strict=True)
        )
        return cls(place, loans, tuple(loads), _outbound(replicated, len(place.axes)))

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(ravel(loan.owner, self.place.sizes) for loan in self.loans)

    def of_tensor(self, index: int) -> list[tuple[Matrix, int]]:
        """The matrices of one tensor, and their owners."""
        return self._by_tensor.get(index, [])

    @cached_property
    def _by_tensor(self) -> dict[int, list[tuple[Matrix, int]]]:
        found: dict[int, list[tuple[Matrix, int]]] = defaultdict(list)
        for loan, owner in zip(self.loans, self.owners, strict=True):
            found[loan.matrix.tensor].append((loan.matrix, owner))
        return dict(found)


def default_matrices(tensors: Sequence[Tensor], names: Sequence[str]) -> tuple[Matrix, ...]:
    each = (matrices_of(t.shape, tensor=i, fqn=names[i]) for i, t in enumerate(tensors))
    return tuple(itertools.chain.from_iterable(each))


def ravel(coordinate: Coordinate, sizes: Coordinate) -> int:
    index = 0
    for at, size in zip(coordinate, sizes, strict=True):
        index = index * size + at
    return index


def unravel(index: int, sizes: Coordinate) -> Coordinate:
    coordinate = []
    for size in reversed(sizes):
        index, at = divmod(index, size)
        coordinate.append(at)
    return tuple(reversed(coordinate))


def _check_owners(owners: Sequence[int], num_matrices: int, num_ranks: int) -> None:
    if len(owners) != num_matrices:
        raise VescaleError(f"owners: expected one rank for each of {num_matrices} matrices, got {len(owners)}.")
    for index, owner in enumerate(owners):
        if not 0 <= owner < num_ranks:
            raise VescaleError(f"owners[{index}]: expected a rank in 0..{num_ranks - 1}, got {owner}.")


def _outbound(replicated: Sequence[frozenset[int]], num_axes: int) -> tuple[int, ...]:
    """Axes of replicas first, so that results cross them last, cut into runs; then the last (fastest) axis first."""
    copies = [axis for axis in range(num_axes) if all(axis in each for each in replicated)]
    return (*copies, *(axis for axis in reversed(range(num_axes)) if axis not in copies))


def _holdings(tensors: Sequence[Tensor], matrices: Sequence[Matrix], place: Place) -> list[dict[Coordinate, Holding]]:
    found: list[dict[Coordinate, Holding]] = [{} for _ in matrices]
    by_tensor: dict[int, list[int]] = defaultdict(list)
    for number in sorted(range(len(matrices)), key=lambda number: matrices[number].begin):
        by_tensor[matrices[number].tensor].append(number)
    for index, numbers in by_tensor.items():
        shape = tuple(tensors[index].shape)
        begins = [matrices[number].begin for number in numbers]
        ends = [matrices[number].end for number in numbers]
        for coordinate in place.coordinates():
            piece = place.piece(tensors[index], coordinate)
            first, last = _extent(piece, shape)
            for number in numbers[bisect_right(ends, first) : bisect_left(begins, last)]:
                if (held := holding_of(matrices[number], shape, piece)) is not None:
                    found[number][coordinate] = held
    return found


def _extent(piece: Piece, shape: tuple[int, ...]) -> tuple[int, int]:
    """Flat elements of the tensor between which the piece lies."""
    boxes = piece.boxes()
    if not boxes:
        return 0, 0
    last = tuple(offset + size - 1 for offset, size in zip(boxes[-1].offsets, boxes[-1].sizes, strict=True))
    return ravel(boxes[0].offsets, shape), ravel(last, shape) + 1


def _is_travelled(axis: int, tensors: Sequence[Tensor], replicas: Replicas) -> bool:
    return replicas is Replicas.SHARE or any(
        not tensor.placements[axis].is_replicate() for tensor in tensors if isinstance(tensor, DTensor)
    )


def _mesh_of(tensor: Tensor) -> DeviceMesh | None:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
