"""Flat segments cut into what a CPU's cache holds: the temporaries of an update stay there, and are small.

An update is a dozen passes over parameter, gradient and states, with temporaries as large as the parameter. Where glibc
gives these fresh pages each time, tiles of 256 thousand elements take 0.56 of the time of 7 million at once. With an
allocator that keeps what is freed they take as much as before, and temporaries of a tile's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .strip import STEP, Segment

__all__ = ["Batch", "Tile", "batches", "joins"]

EXACT_ON_CPU = (torch.float32, torch.float64)
"""Dtypes in which CPU kernels give an element the same bits wherever it stands; others round in vectors only."""
NUMEL = 1 << 18
"""Elements of a tile, and of the tiles that are stepped together."""
SMALL = 1 << 20
"""Elements that are stepped together where nothing is cut: their temporaries do not count, but Python's time does."""


@dataclass(eq=False)
class Tile:
    """Elements [begin, begin + numel) of a segment, and views of its states. A whole segment is a tile, too."""

    segment: Segment
    begin: int
    param: Tensor
    state: dict[str, Any]
    expected: tuple[Any, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.param is self.segment.param

    def bind(self) -> None:
        """Take this step's gradient from the segment, of which the tile is a part."""
        grad = self.segment.param.grad
        assert grad is not None
        self.param.grad = grad.narrow(0, self.begin, self.param.numel())

    def release(self) -> None:
        """After the step: let go of the gradient. Whatever states a tile has, optimizers have updated in place."""
        self.param.grad = None
        assert all(map(is_, self.state.values(), self.expected))
        assert len(self.state) == len(self.expected)


@dataclass(eq=False)
class Batch:
    """Tiles of one of the optimizer's groups that are stepped in one call."""

    group: int
    params: list[Tensor]


def joins(shard: Tensor, group: dict[str, Any]) -> bool:
    """Whether an element of `shard` gets the same bits in a tensor of any size."""
    return not shard.is_cpu or (shard.dtype in EXACT_ON_CPU and not group.get("fused"))


def cut(segment: Segment, group: dict[str, Any]) -> list[Tile]:
    """The segment's tiles; it stays whole where it is small, has no states yet, or a cut would change bits."""
    numel = segment.param.numel()
    if not _is_cuttable(segment, group) or numel <= NUMEL or not _is_filled(segment):
        return [Tile(segment, 0, segment.param, segment.state)]
    return [_tile(segment, begin, min(NUMEL, numel - begin)) for begin in range(0, numel, NUMEL)]


def _is_cuttable(segment: Segment, group: dict[str, Any]) -> bool:
    return segment.param.is_cpu and joins(segment.param, group)


def _is_filled(segment: Segment) -> bool:
    """Whether the optimizer has made its states."""
    states = [value for key, value in segment.state.items() if key != STEP]
    return bool(states) and all(value is not None for value in states)


def _tile(segment: Segment, begin: int, numel: int) -> Tile:
    state = {
        key: (value if begin == 0 else value.clone()) if key == STEP else value.narrow(0, begin, numel)
        for key, value in segment.state.items()
    }
    return Tile(segment, begin, segment.param.narrow(0, begin, numel), state, tuple(state.values()))


def batches(segments: Sequence[Segment], groups: Sequence[dict[str, Any]]) -> tuple[list[Tile], list[Batch]]:
    """Tiles of all segments, and which are stepped together: what a cache holds, or where nothing is cut, no more
    elements than the largest segment has, so that temporaries are not the whole model's."""
    tiles: list[Tile] = []
    found: list[Batch] = []
    for is_cuttable in (True, False):
        own = [each for each in segments if _is_cuttable(each, groups[each.group]) is is_cuttable]
        limit = NUMEL if is_cuttable else max([SMALL, *(each.param.numel() for each in own)])
        cut_tiles = [tile for each in own for tile in cut(each, groups[each.group])]
        found += _batched(cut_tiles, limit)
        tiles += cut_tiles
    return tiles, found


def _batched(tiles: Sequence[Tile], limit: int) -> Iterator[Batch]:
    batch: Batch | None = None
    numel = 0
    for tile in sorted(tiles, key=lambda tile: tile.segment.group):
        numel += tile.param.numel()
        if batch is not None and numel <= limit and tile.segment.group == batch.group:
            batch.params.append(tile.param)
            continue
        if batch is not None:
            yield batch
        batch, numel = Batch(tile.segment.group, [tile.param]), tile.param.numel()
    if batch is not None:
        yield batch
