"""What each rank must hold, by slicing the full tensor with torch's own functions; knows nothing of the code under test
but the placements' names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_dtensor import LayoutError, RaggedShard, StridedRaggedShard
from ragged_dtensor.ownership import piece_of

SHAPES: list[tuple[int, ...]] = [(24,), (12, 5), (6, 4, 2), (2, 3, 2, 1, 2), (0, 3), (3, 0), (1, 7), (2,), ()]


def held(
    full: torch.Tensor, placements: Sequence[Placement], mesh: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """The local tensor of the rank at `coordinate`: cuts from left to right, strided ones last.

    Those are taken at the rows at which they would be in the first, longest piece of a Shard(0).
    """
    part = longest = full
    flattened = 1
    order = sorted(range(len(placements)), key=lambda axis: isinstance(placements[axis], StridedRaggedShard))
    for axis in order:
        placement, size, index = placements[axis], mesh[axis], coordinate[axis]
        if isinstance(placement, RaggedShard):
            num_dims, units = len(placement.dims) - flattened + 1, tuple(placement.local_units)
            shared = longest if isinstance(placement, StridedRaggedShard) else part
            whole = math.prod(shared.shape[:num_dims])
            part, longest = _rows(part, num_dims, units, index, whole), _rows(longest, num_dims, units, index)
            flattened = len(placement.dims)
        elif isinstance(placement, Shard):
            dim = placement.dim - flattened + 1
            part = _chunk(part, size, dim, index)
            longest = _chunk(longest, size, dim, index if placement.dim else 0)
    return part.contiguous()


def _chunk(part: torch.Tensor, size: int, dim: int, index: int) -> torch.Tensor:
    chunks = torch.chunk(part, size, dim)
    return chunks[index] if index < len(chunks) else part.narrow(dim, 0, 0)


def _rows(
    part: torch.Tensor, num_dims: int, units: tuple[int, ...], index: int, whole: int | None = None
) -> torch.Tensor:
    part = part.reshape(math.prod(part.shape[:num_dims]), *part.shape[num_dims:])
    if not part.numel():
        return part[:0]
    whole = len(part) if whole is None else whole
    unit = whole // sum(units)
    assert unit * sum(units) == whole
    return part[unit * sum(units[:index]) : unit * sum(units[: index + 1])]


def some_units(num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Equal shares, one owner at either end, a gap, and a run as a plan makes it."""
    yield (1,) * num_ranks
    if num_ranks == 1:
        return
    yield (1,) + (0,) * (num_ranks - 1)
    yield (0,) * (num_ranks - 1) + (1,)
    yield ((2, 1), (2, 0, 1), (1, 0, 2, 3))[num_ranks - 2]
    if num_ranks > 2:
        yield ((1, 2, 1), (0, 1, 2, 1))[num_ranks - 3]


def placements_of(shape: tuple[int, ...], num_ranks: int) -> list[Placement]:
    """Every kind of placement that fits the shape on one mesh axis."""
    plain: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    if not shape:
        one_hot = ((0,) * i + (1,) + (0,) * (num_ranks - i - 1) for i in range(num_ranks))
        return [*plain, *(RaggedShard((), units) for units in one_hot)]
    leading = (tuple(range(k)) for k in range(1, len(shape) + 1))
    ragged = (RaggedShard(dims, units) for dims, units in itertools.product(leading, some_units(num_ranks)))
    return [*plain, *(placement for placement in ragged if fits(shape, (placement,), (num_ranks,)))]


def placements_on(shape: tuple[int, ...], mesh: tuple[int, int]) -> list[tuple[Placement, Placement]]:
    """Every pair of placements that fits the shape on a 2-D mesh."""
    first, second = (placements_of(shape, size) for size in mesh)
    strided = [
        StridedRaggedShard(p.dims, p.local_units, mesh[1]) for p in first if isinstance(p, RaggedShard) and p.dims
    ]
    return [pair for pair in itertools.product([*first, *strided], second) if fits(shape, pair, mesh)]


def fits(shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: tuple[int, ...]) -> bool:
    try:
        piece_of(shape, placements, mesh, (0,) * len(mesh))
    except LayoutError:
        return False
    return True


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose elements all differ."""
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
