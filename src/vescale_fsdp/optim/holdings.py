"""Which run of its local memory a rank holds of a whole matrix, and where in the matrix that run belongs.

A rank's piece is a box of the tensor or a flat range inside one; a matrix is a contiguous run of the tensor. They meet
in one run of local memory, whose elements are up to three boxes of the matrix. A (4, 3) matrix cut flat into 5 + 7:

    rank 0   0 1 2     local 0..5  ->  flat 0..5        rank 1   . . .     local 0..7  ->  flat 5..12
             3 4 .                                               . . 5
             . . .                                               6 7 8

Under `Shard(1)` (tensor parallelism) the run belongs in a box of columns instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_dtensor import StridedRaggedShard
from ragged_dtensor.layout import Box, Piece, chunk_range
from ragged_dtensor.ownership import piece_of
from vescale_fsdp.errors import VescaleError

from .matrices import Matrix

__all__ = ["Block", "Holding", "holding_of", "piece_at", "unflattened"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """`numel` elements of a run, beginning at its element `start`, that fill the box `offsets`, `sizes` of a matrix.

    The matrix is seen with its columns unflattened: a convolution's (O, I*kh*kw) as (O, I, kh, kw).
    """

    start: int
    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def of(self, matrix: Tensor) -> Tensor:
        """The view of the unflattened `matrix` that this block fills."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            matrix = matrix.narrow(dim, offset, size)
        return matrix


@dataclass(frozen=True)
class Holding:
    """A run of `numel` elements of local memory from element `start` on, and the blocks of the matrix that it is.

    `begin` is where the run begins in the row-major matrix if it is one run there too, else None.
    """

    start: int
    numel: int
    begin: int | None
    blocks: tuple[Block, ...]

    def scatter(self, run: Tensor, matrix: Tensor) -> None:
        """Copy the run into its place in the unflattened matrix."""
        for block in self.blocks:
            block.of(matrix).copy_(run.narrow(0, block.start, block.numel).view(block.sizes))

    def collect(self, matrix: Tensor, run: Tensor) -> None:
        """Copy the run's elements out of the unflattened matrix."""
        for block in self.blocks:
            run.narrow(0, block.start, block.numel).view(block.sizes).copy_(block.of(matrix))


def piece_at(shape: Shape, placements: Sequence[Placement], mesh: Shape, coordinate: Shape) -> Piece:
    """What a rank owns, for torch's placements of FSDP2 over tensor parallelism too.

    Raises ValueError for placements that own nothing definite (Partial) or that ragged tensors do not know.
    """
    if any(placement.is_partial() for placement in placements):
        raise VescaleError(
            f"Expected owned elements, got placements {tuple(placements)}. Redistribute the Partial first."
        )
    return piece_of(shape, _without_strided_shards(tuple(placements), shape, mesh), mesh, coordinate)


def holding_of(matrix: Matrix, shape: Shape, piece: Piece) -> Holding | None:
    """The run that `piece` of a tensor of `shape` holds of `matrix`, or None."""
    bounds = _bounds(matrix, shape)
    found = [hit for box in piece.boxes() if (hit := _meet(box, bounds)) is not None]
    if not found:
        return None
    start = found[0][0]
    row_dim = _row_dim(matrix, shape)
    blocks = []
    for local, offsets, sizes in found:
        inner = tuple(a - b for a, (b, _) in zip(offsets[row_dim:], bounds[row_dim:], strict=True))
        blocks.append(Block(local - start, inner, sizes[row_dim:]))
    numel = sum(block.numel for block in blocks)
    return Holding(start, numel, _flat_begin(blocks, unflattened(matrix, shape)), tuple(blocks))


def unflattened(matrix: Matrix, shape: Shape) -> Shape:
    """The matrix's shape before its columns were flattened: `(rows, *the dims behind the rows)`."""
    return matrix.rows, *shape[_row_dim(matrix, shape) + 1 :]


def _flat_begin(blocks: Sequence[Block], shape: Shape) -> int | None:
    """The flat element of a matrix of `shape` at which the blocks begin, if one follows the other without a gap."""
    begin = end = None
    for block in blocks:
        first = 0
        for offset, size in zip(block.offsets, shape, strict=True):
            first = first * size + offset
        last = 0
        for offset, taken, size in zip(block.offsets, block.sizes, shape, strict=True):
            last = last * size + offset + taken - 1
        if last - first + 1 != block.numel or end not in (None, first):
            return None
        begin = first if begin is None else begin
        end = last + 1
    return begin


def _row_dim(matrix: Matrix, shape: Shape) -> int:
    for dim in range(len(shape)):
        if math.prod(shape[dim + 1 :]) == matrix.columns:
            return dim
    raise AssertionError(f"{matrix} has rows that are not rows of a tensor of shape {shape}")


def _bounds(matrix: Matrix, shape: Shape) -> tuple[tuple[int, int], ...]:
    """The matrix as (begin, end) in each dim of the tensor."""
    row_dim = _row_dim(matrix, shape)
    row = matrix.begin // matrix.columns
    bounds = []
    for dim in range(row_dim):
        row_stride = math.prod(shape[dim + 1 : row_dim + 1])
        index = row // row_stride
        bounds.append((index, index + 1))
        row -= index * row_stride
    return (*bounds, (row, row + matrix.rows), *((0, size) for size in shape[row_dim + 1 :]))


def _meet(box: Box, bounds: tuple[tuple[int, int], ...]) -> tuple[int, Shape, Shape] | None:
    """Where box and matrix meet: first element in local memory, offsets in the tensor, sizes."""
    begins, sizes = [], []
    for (begin, end), offset, size in zip(bounds, box.offsets, box.sizes, strict=True):
        first, last = max(begin, offset), min(end, offset + size)
        if first >= last:
            return None
        begins.append(first)
        sizes.append(last - first)
    local = 0
    for first, offset, size in zip(begins, box.offsets, box.sizes, strict=True):
        local = local * size + first - offset
    return box.start + local, tuple(begins), tuple(sizes)


def _without_strided_shards(placements: tuple[Placement, ...], shape: Shape, mesh: Shape) -> tuple[Placement, ...]:
    return tuple(_as_ragged(placement, axis, placements, shape, mesh) for axis, placement in enumerate(placements))


def _as_ragged(
    placement: Placement, axis: int, placements: tuple[Placement, ...], shape: Shape, mesh: Shape
) -> Placement:
    """torch's strided shard over `Shard(0)` pieces of equal size is a strided ragged shard in chunks."""
    split_factor = getattr(placement, "split_factor", None)
    if isinstance(placement, StridedRaggedShard) or split_factor is None:
        return placement
    dim = getattr(placement, "dim", None)
    pieces = math.prod(mesh[i] for i in range(axis + 1, len(mesh)) if placements[i] == Shard(0))
    if dim != 0 or pieces != split_factor or shape[0] % pieces:
        return placement  # refused by name where the piece is computed
    return StridedRaggedShard((0,), tuple(_chunk_sizes(shape[0] // pieces, mesh[axis])), pieces)


def _chunk_sizes(size: int, num_chunks: int) -> Iterator[int]:
    for index in range(num_chunks):
        begin, end = chunk_range(size, num_chunks, index)
        yield end - begin
