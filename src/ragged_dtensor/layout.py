"""Which elements of a tensor one rank holds, in integers only.

A `Piece` is a box of the full tensor, or a flat range inside a box. A tensor of shape (3, 4) whose 12 elements are cut
flat into 5 + 7 (`dims=(0, 1)`):

    rank 0   0  1  2  3        rank 1   .  .  .  .        rank 1 as boxes:  (1, 1)+(1, 3)   the rest of row 1
             4  .  .  .                 .  5  6  7                          (2, 0)+(1, 4)   whole rows
             .  .  .  .                 8  9 10 11

"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ragged_dtensor.errors import LayoutError
from ragged_dtensor.units import Units

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A box of a tensor whose elements lie one after the other in a rank's memory, from element `start` on."""

    offsets: Shape
    sizes: Shape
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Piece:
    """The box `offsets`, `sizes` of a full tensor; of it, the rows `begin..end` of its first `num_flat` dims if ragged.

    `num_flat` is None for a plain box. A ragged piece has the local shape `(end - begin, *sizes[num_flat:])`.
    """

    offsets: Shape
    sizes: Shape
    num_flat: int | None = None
    begin: int = 0
    end: int = 0

    @classmethod
    def whole(cls, shape: Shape) -> Piece:
        return cls((0,) * len(shape), tuple(shape))

    def chunk(self, dim: int, num_chunks: int, index: int) -> Piece:
        """The `index`-th of `num_chunks` pieces along `dim`, sized as `torch.chunk` sizes them."""
        if not 0 <= dim < len(self.sizes):
            raise LayoutError(f"Shard({dim}) needs a tensor with more than {dim} dims, got shape {self.sizes}.")
        if self.num_flat is not None and dim < self.num_flat:
            raise LayoutError(
                f"Shard({dim}) cannot cut a piece that is already cut along dims 0..{self.num_flat - 1} by an earlier "
                "mesh axis. Use StridedRaggedShard there, which cuts inside each piece of the later Shard(0)."
            )
        begin, end = chunk_range(self.sizes[dim], num_chunks, index)
        offsets = (*self.offsets[:dim], self.offsets[dim] + begin, *self.offsets[dim + 1 :])
        sizes = (*self.sizes[:dim], end - begin, *self.sizes[dim + 1 :])
        return Piece(offsets, sizes, self.num_flat, self.begin, self.end)

    def cut(self, num_flat: int, units: Units, index: int, *, longest: Piece | None = None) -> Piece:
        """The share of rank `index` when the first `num_flat` dims are flattened and cut by `units`.

        longest: of several pieces that are cut at the same rows, the one whose rows the units share; of 3 and 2 rows,
            units (1, 2) cut the first into 1 + 2 and the second into 1 + 1.
        """
        begin, end = self._rows(num_flat)
        shared_begin, shared_end = (self if longest is None else longest)._rows(num_flat)
        has_elements = math.prod(self.sizes[num_flat:]) > 0
        first, last = cut_range(shared_end - shared_begin, units, index, has_elements=has_elements)
        return Piece(self.offsets, self.sizes, num_flat, min(begin + first, end), min(begin + last, end))

    def _rows(self, num_flat: int) -> tuple[int, int]:
        if self.num_flat is None:
            return 0, math.prod(self.sizes[:num_flat])
        if num_flat < self.num_flat:
            raise LayoutError(
                f"A cut of {num_flat} leading dims cannot follow one of {self.num_flat} leading dims on an earlier "
                "mesh axis: rows are already cut. Give the later placement at least the dims of the earlier one."
            )
        width = math.prod(self.sizes[self.num_flat : num_flat])
        return self.begin * width, self.end * width

    @property
    def local_shape(self) -> Shape:
        if self.num_flat is None:
            return self.sizes
        return (self.end - self.begin, *self.sizes[self.num_flat :])

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    def boxes(self) -> tuple[Box, ...]:
        """The piece as boxes of the full tensor, in memory order; at most `2 * ndim - 1`, none if it is empty."""
        if not self.numel:
            return ()
        if self.num_flat is None:
            return (Box(self.offsets, self.sizes, 0),)
        flat, rest = self.sizes[: self.num_flat], self.sizes[self.num_flat :]
        width = math.prod(rest)
        return tuple(
            Box(
                tuple(a + b for a, b in zip(self.offsets, (*offsets, *(0 for _ in rest)), strict=True)),
                (*sizes, *rest),
                start * width,
            )
            for offsets, sizes, start in flat_boxes(flat, self.begin, self.end)
        )


def chunk_range(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Begin and end of a chunk as `torch.chunk` places it: ceil(size / num_chunks) each, the last short or empty."""
    step = -(-size // num_chunks)
    return min(size, step * index), min(size, step * (index + 1))


def cut_range(rows: int, units: Units, index: int, *, has_elements: bool = True) -> tuple[int, int]:
    """Begin and end of a rank's rows when `units` share `rows`; without elements any units do and all are empty."""
    if not rows or not has_elements:
        return 0, 0
    if rows % units.total:
        raise LayoutError(
            f"{rows} rows do not split into {units.total} units (local_units={units.spell()}). The sum of the units, "
            "after division by their gcd, must divide the product of the sizes of the placement's dims."
        )
    unit = rows // units.total
    begin = units.before(index) * unit
    return begin, begin + units[index] * unit


def flat_boxes(shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Boxes (offsets, sizes, start) of the flat range `begin..end` of a tensor of `shape`, in order.

    >>> list(flat_boxes((3, 4), 5, 12))
    [((1, 1), (1, 3), 0), ((2, 0), (1, 4), 3)]
    """
    if begin >= end:
        return
    if len(shape) <= 1:
        yield ((begin,), (end - begin,), 0) if shape else ((), (), 0)
        return
    width = math.prod(shape[1:])
    first, last = -(-begin // width), end // width
    if first > last:  # inside one row
        yield from _in_row(shape, begin // width, begin % width, begin % width + end - begin, 0)
        return
    if begin % width:
        yield from _in_row(shape, first - 1, begin % width, width, 0)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * width - begin
    if end % width:
        yield from _in_row(shape, last, 0, end % width, last * width - begin)


def _in_row(shape: Shape, row: int, begin: int, end: int, start: int) -> Iterator[tuple[Shape, Shape, int]]:
    for offsets, sizes, inner in flat_boxes(shape[1:], begin, end):
        yield (row, *offsets), (1, *sizes), start + inner
