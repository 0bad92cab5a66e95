"""Which boxes of the full tensor a rank holds, and where each lies in its memory; remembered for every layout.

Torch's strided shards leave a rank several runs of a dim. A ragged cut beside one is taken inside what they leave, and
its boxes end where a run ends:

    shape (8, 3), _StridedShard(0, split_factor=2)     rank 0 has rows 0 1 4 5, rank 1 has rows 2 3 6 7
    and RaggedShard((0,), (1, 3)) inside rank 0's      row 0, and rows 1 4 5: the boxes (1, 0)+(1, 3) and (4, 0)+(2, 3)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul

from torch.distributed.tensor.placement_types import Replicate, Shard

from ragged_dtensor import _torch
from ragged_dtensor.errors import LayoutError
from ragged_dtensor.layout import Box, Piece, Shape, chunk_range
from ragged_dtensor.ownership import Placements, piece_of

Run = tuple[int, int]
"""Where indices of a dim begin that follow each other, and how many they are."""


@dataclass(frozen=True)
class HeldBox:
    """A box of the full tensor whose first element is element `start` of a rank's memory, with these strides there."""

    offsets: Shape
    sizes: Shape
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Nest:
    """What torch's own placements leave on a rank, as runs of each dim, and the piece of it that ragged cuts leave."""

    runs: tuple[tuple[Run, ...], ...]
    piece: Piece

    @classmethod
    def of(cls, shape: Shape, placements: Placements, mesh: Shape, coordinate: Shape) -> Nest:
        runs = [[(0, size)] for size in shape]
        for placement, num_ranks, index in zip(placements, mesh, coordinate, strict=True):
            if _torch.has_strided_shard([placement]):
                dim, parts = placement.dim, range(placement.split_factor)  # type: ignore[attr-defined]
                split = [_chunk(runs[dim], len(parts), part) for part in parts]
                runs[dim] = [run for each in split for run in _chunk(each, num_ranks, index)]
            elif isinstance(placement, Shard):
                runs[placement.dim] = _chunk(runs[placement.dim], num_ranks, index)
            elif not isinstance(placement, Replicate) and not _torch.seams.is_ragged(placement):
                raise LayoutError(f"{placement} cannot stand beside a ragged placement.")
        inner = tuple(each if _torch.seams.is_ragged(each) else Replicate() for each in placements)
        part = tuple(sum(size for _, size in each) for each in runs)
        return cls(tuple(map(tuple, runs)), piece_of(part, inner, mesh, coordinate))


@functools.lru_cache(maxsize=16384)
def held_boxes(shape: Shape, placements: Placements, mesh: Shape, coordinate: Shape) -> tuple[HeldBox, ...]:
    """The boxes of the rank at `coordinate` of a mesh of shape `mesh`, in memory order; none if it holds nothing."""
    if not _torch.has_strided_shard(placements):
        boxes = piece_of(shape, placements, mesh, coordinate).boxes()
        return tuple(HeldBox(each.offsets, each.sizes, each.start, _strides(each)) for each in boxes)
    nest = Nest.of(shape, placements, mesh, coordinate)
    return tuple(held for box in nest.piece.boxes() for held in _split(box, nest.runs))


def _split(box: Box, runs: Sequence[Sequence[Run]]) -> Iterator[HeldBox]:
    """A box of the part, as boxes of the full tensor."""
    strides = _strides(box)
    within = [_within(each, begin, size) for each, begin, size in zip(runs, box.offsets, box.sizes, strict=True)]
    for parts in itertools.product(*within):
        inner, offsets, sizes = zip(*parts, strict=True)
        yield HeldBox(offsets, sizes, box.start + sum(map(mul, inner, strides)), strides)


def _within(runs: Sequence[Run], begin: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Places `begin`, `begin + 1`, ... of `runs`: of each run, how far into them it is, where in the dim, its size."""
    place = 0
    for offset, length in runs:
        first, last = max(begin, place), min(begin + size, place + length)
        if first < last:
            yield first - begin, offset + first - place, last - first
        place += length


def _chunk(runs: Sequence[Run], num_chunks: int, index: int) -> list[Run]:
    """The `index`-th of `num_chunks` chunks of the indices in `runs`, sized as `torch.chunk` sizes them."""
    begin, end = chunk_range(sum(size for _, size in runs), num_chunks, index)
    return [(offset, size) for _, offset, size in _within(runs, begin, end - begin)]


def _strides(box: Box) -> tuple[int, ...]:
    return _torch.contiguous_stride(box.sizes)
