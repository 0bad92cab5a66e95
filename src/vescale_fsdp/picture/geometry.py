"""Rectangles and rows of a plan's picture: ranks downwards, a rank's share from left to right. Integers only.

A tensor is at most three rectangles, however many ranks it spans: its end on the first rank, the full shares of the
ranks between, its rest on the last.

    share = 8, start 5, numel 20    ->    rank 0 |.....aaa|    Piece(5, 8, 0, 1)
                                          rank 1 |aaaaaaaa|    Piece(0, 8, 1, 3)
                                          rank 2 |aaaaaaaa|
                                          rank 3 |a.......|    Piece(0, 1, 3, 4)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ..plan import GroupPlan, Span, TensorPlan

__all__ = ["Piece", "Row", "block_edges", "gaps", "lane_tensors", "pieces", "rows"]

ALL_RANKS = 16
"""Up to here every rank is a row of its own."""

MAX_ROWS = 36
"""More rows than this cannot be read; the least telling ones become two mixed rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """The ranks [first, end): one rank, a run of ranks that look alike, or, if mixed, ranks that are shown as a sum."""

    first: int
    end: int
    mixed: bool = False

    @property
    def ranks(self) -> int:
        return self.end - self.first

    @property
    def height(self) -> float:
        """1 for one rank, growing slowly with their number."""
        return 1 + math.log2(self.ranks) / 3

    @property
    def label(self) -> str:
        return str(self.first) if self.ranks == 1 else f"{self.first}-{self.end - 1}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [left, right) of the share on each of the ranks [top, bottom)."""

    left: int
    right: int
    top: int
    bottom: int


def pieces(span: Span, share: int) -> Iterator[Piece]:
    """The rectangles of a run of a lane's buffer."""
    begin, end = span.begin, span.end
    if begin == end:
        return
    first, last = begin // share, (end - 1) // share
    if first == last:
        yield Piece(begin - first * share, end - first * share, first, first + 1)
        return
    full_from = first if begin == first * share else first + 1
    full_to = last + 1 if end == (last + 1) * share else last
    if first < full_from:
        yield Piece(begin - first * share, share, first, first + 1)
    if full_from < full_to:
        yield Piece(0, share, full_from, full_to)
    if full_to <= last:
        yield Piece(0, end - last * share, last, last + 1)


def gaps(plan: GroupPlan, lane: int) -> Iterator[Span]:
    """The runs of a lane's buffer that belong to no tensor."""
    position = 0
    for tensor in sorted(lane_tensors(plan, lane), key=lambda tensor: tensor.start):
        if tensor.start > position:
            yield Span(position, tensor.start)
        position = tensor.start + tensor.spec.numel
    end = plan.num_ranks * plan.lanes[lane].share
    if position < end:
        yield Span(position, end)


def lane_tensors(plan: GroupPlan, lane: int) -> list[TensorPlan]:
    """Tensors of a lane that have elements."""
    return [tensor for tensor in plan.tensors if tensor.lane == lane and tensor.spec.numel]


def block_edges(tensor: TensorPlan, share: int) -> Iterator[Piece]:
    """Where one block ends and the next begins, as pieces without width."""
    block = tensor.spec.granularity.numel
    span = Span(tensor.start, tensor.start + tensor.spec.numel)
    for piece in pieces(span, share):
        first = piece.top * share + piece.left - tensor.start
        for inside in range(-first % block or block, piece.right - piece.left, block):
            yield Piece(piece.left + inside, piece.left + inside, piece.top, piece.bottom)


def rows(plan: GroupPlan, lane: int) -> list[Row]:
    """All ranks in order, in at most MAX_ROWS rows.

    Ranks that one tensor (or padding) fills alike are one row. If that is not enough, the first, middle and last ranks
    stay and those between become mixed rows.
    """
    if plan.num_ranks <= ALL_RANKS:
        return [Row(rank, rank + 1) for rank in range(plan.num_ranks)]
    share = plan.lanes[lane].share
    spans = [Span(t.start, t.start + t.spec.numel) for t in lane_tensors(plan, lane)] + list(gaps(plan, lane))
    full = [piece for span in spans for piece in pieces(span, share) if piece.right - piece.left == share]
    found: list[Row] = []
    position = 0
    for piece in sorted(full, key=lambda piece: piece.top):
        found += [Row(rank, rank + 1) for rank in range(position, piece.top)]
        found.append(Row(piece.top, piece.bottom))
        position = piece.bottom
    found += [Row(rank, rank + 1) for rank in range(position, plan.num_ranks)]
    return found if len(found) <= MAX_ROWS else _sampled(found)


def _sampled(found: list[Row]) -> list[Row]:
    keep = MAX_ROWS // 3 - 1
    middle = (len(found) - keep) // 2
    chosen = [found[:keep], found[middle : middle + keep], found[-keep:]]
    mixed = [Row(one[-1].end, two[0].first, mixed=True) for one, two in pairwise(chosen)]
    return [*chosen[0], mixed[0], *chosen[1], mixed[1], *chosen[2]]
