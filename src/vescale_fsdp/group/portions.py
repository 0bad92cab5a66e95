"""A whole in portions that are reduced one after the other: the same elements of every rank's share.

    num_ranks=2, share=8, two portions; a: 10 elements, b: 4
      whole      |aaaaaaaa|aa..bbbb|
      portion 0  |aaaa|aa..|             elements [0, 4) of each share
      portion 1  |aaaa|bbbb|             elements [4, 8)

A rank's share of a portion is a piece of its share of the whole, so what is reduced lands where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..layout import Layout, Span

__all__ = ["Block", "Portion", "cut_into_portions", "largest_portion"]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements of one tensor in one portion: `rows` runs of `width`, `stride` apart in the tensor, without gaps here.

    `begin` counts from the first element of the tensor, `target` from that of the portion.
    """

    begin: int
    target: int
    rows: int
    width: int
    stride: int

    @property
    def span(self) -> Span:
        """In the portion."""
        return Span(self.target, self.target + self.rows * self.width)


@dataclass(frozen=True, slots=True)
class Portion:
    """`columns[i]`: which elements of each share of lane i; `blocks[i]`: where tensor i lies."""

    columns: tuple[Span, ...]
    lane_numels: tuple[int, ...]
    blocks: tuple[tuple[Block, ...], ...]

    @property
    def numel(self) -> int:
        return sum(self.lane_numels)

    def holds(self, tensor: int, numel: int) -> bool:
        """Whether the tensor lies here as a whole, in one run."""
        blocks = self.blocks[tensor]
        return len(blocks) == 1 and len(blocks[0].span) == numel


def cut_into_portions(layout: Layout, numels: Sequence[int], num_portions: int, *, align: int) -> tuple[Portion, ...]:
    """Portions that begin at multiples of `align` elements of a share: equal ones, but for the last."""
    widths, shares = _widths(layout, num_portions, align), [lane.share for lane in layout.lanes]
    cuts = [
        [min(i * width, share) for width, share in zip(widths, shares, strict=True)] for i in range(num_portions + 1)
    ]
    portions = []
    for begins, ends in pairwise(cuts):
        columns = tuple(Span(begin, end) for begin, end in zip(begins, ends, strict=True))
        lane_numels = tuple(layout.num_ranks * len(each) for each in columns)
        bases = list(accumulate(lane_numels, initial=0))
        blocks = tuple(_blocks(layout, i, numel, columns, bases) for i, numel in enumerate(numels))
        portions.append(Portion(columns, lane_numels, blocks))
    return tuple(portions)


def largest_portion(layout: Layout, num_portions: int, *, align: int) -> int:
    """Elements of the largest of them."""
    return layout.num_ranks * sum(_widths(layout, num_portions, align))


def _widths(layout: Layout, num_portions: int, align: int) -> list[int]:
    """Elements of each lane's share that a portion takes."""
    return [min(-(-lane.share // (num_portions * align)) * align, lane.share) for lane in layout.lanes]


def _blocks(
    layout: Layout, tensor: int, numel: int, columns: Sequence[Span], bases: Sequence[int]
) -> tuple[Block, ...]:
    """One block for the first share that the tensor touches, one for the last, one for all between them."""
    lane, start = layout.lane_of[tensor], layout.starts[tensor]
    share, wanted = layout.lanes[lane].share, columns[lane]
    if len(wanted) == share:
        return (Block(0, bases[lane] + start, 1, numel, share),)
    if not numel or not len(wanted):
        return ()
    first, last = start // share, (start + numel - 1) // share
    found: list[Block] = []
    for rank, rows in ((first, 1), (first + 1, last - first - 1), (last, 1 if last > first else 0)):
        if rows < 1:
            continue
        begin, end = max(start - rank * share, wanted.begin), min(start + numel - rank * share, wanted.end)
        if begin < end:
            target = bases[lane] + rank * len(wanted) + begin - wanted.begin
            found.append(Block(rank * share + begin - start, target, rows, end - begin, share))
    return tuple(found)
