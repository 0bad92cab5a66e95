"""How the blocks of a format tile one tensor, and how pieces of it become rows of whole blocks and back.

A block shape is (rows, columns), tiled over the last two dims, or (length,), tiled over the flattened tensor:

    tensor (5, 6), blocks (2, 4)          tensor (5, 6), blocks (4,)
      0000 11                               0000 11
      0000 11                               11 2222
      2222 33                               3333 44
      2222 33                               44 5555
      4444 55   <- edge blocks: short       6666 77  <- the last block is short
    granularity: 2 rows = 12 elements     granularity: 4 elements

Which dims are meant: a 1-D tensor is one row; a 3-D tensor is a stack of matrices (fused experts), and no block holds
elements of two of them; a tensor of more dims is the matrix (shape[0], everything else).

Edge rule: a block that sticks out over the tensor's edge is filled up with zeros before it is encoded. Zeros change no
largest magnitude, so its scale is that of the elements that exist; what was filled in is never stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ..errors import VescaleError

__all__ = ["Tiling"]


@dataclass(frozen=True)
class Tiling:
    """The blocks of shape `block` in a tensor of shape `shape`.

    A piece is a run of the flattened tensor that starts at a multiple of `granularity` elements, and ends at one or at
    the tensor's end: what a rank owns. Pieces hold whole blocks, in the order of the tensor's memory.
    """

    block: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.block) not in (1, 2) or any(size < 1 for size in self.block):
            raise VescaleError(f"a block shape is (length,) or (rows, columns), all >= 1, got {self.block}")
        if any(size < 0 for size in self.shape):
            raise VescaleError(f"sizes are >= 0, got shape {self.shape}")

    @cached_property
    def granularity(self) -> int:
        """Elements of the flattened tensor that may not be cut: whole blocks in a contiguous run."""
        _, height, width = self._matrices
        rows, columns = self._sizes
        if self._is_run:
            return columns
        if self._has_short_ends:
            return max(height * width, 1)
        return max(rows * width, 1)

    @property
    def block_numel(self) -> int:
        return math.prod(self.block)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_blocks(self) -> int:
        """Of the whole tensor."""
        return self.count(self.numel)

    def count(self, numel: int) -> int:
        """Blocks in a piece of `numel` elements."""
        stack, height, width = self._piece(numel)
        rows, columns = self._sizes
        return stack * -(-height // rows) * -(-width // columns)

    def split(self, piece: torch.Tensor) -> torch.Tensor:
        """A flat piece as (blocks, elements of a block), each block row by row, edge blocks filled up with zeros."""
        stack, height, width = self._piece(piece.numel())
        rows, columns = self._sizes
        down, across = -(-height // rows), -(-width // columns)
        matrices = piece.reshape(stack, height, width)
        if (down * rows, across * columns) != (height, width):
            matrices = torch.nn.functional.pad(matrices, (0, across * columns - width, 0, down * rows - height))
        tiles = matrices.reshape(stack, down, rows, across, columns)
        return tiles.transpose(2, 3).reshape(stack * down * across, rows * columns)

    def join(self, blocks: torch.Tensor, numel: int) -> torch.Tensor:
        """The flat piece of `numel` elements that `split` made `blocks` of."""
        stack, height, width = self._piece(numel)
        rows, columns = self._sizes
        down, across = -(-height // rows), -(-width // columns)
        tiles = blocks.reshape(stack, down, across, rows, columns).transpose(2, 3)
        return tiles.reshape(stack, down * rows, across * columns)[:, :height, :width].reshape(numel)

    def split_into(self, piece: torch.Tensor, blocks: torch.Tensor) -> None:
        """`split` into memory that lies ready, of any dtype: one copy unless there are edge blocks."""
        tiles = self._tiles(piece)
        if tiles is None:
            blocks.copy_(self.split(piece))
        else:
            blocks.view(tiles.shape).copy_(tiles)

    def join_into(self, blocks: torch.Tensor, piece: torch.Tensor) -> None:
        """`join` into the flat tensor `piece`, of any dtype: one copy unless there are edge blocks."""
        tiles = self._tiles(piece)
        if tiles is None:
            piece.copy_(self.join(blocks, piece.numel()))
        else:
            tiles.copy_(blocks.reshape(tiles.shape))

    def _tiles(self, piece: torch.Tensor) -> torch.Tensor | None:
        """The piece seen as (stack, down, across, rows, columns), if every block is full."""
        stack, height, width = self._piece(piece.numel())
        rows, columns = self._sizes
        if height % rows or width % columns:
            return None
        return piece.view(stack, height // rows, rows, width // columns, columns).transpose(2, 3)

    def chunks(self, numel: int, most: int, *, multiple: int = 1) -> Iterator[tuple[int, int, int]]:
        """A piece of `numel` elements as (begin, end, first block) of pieces of about `most` elements each.

        Their begins are multiples of `multiple` elements too. One granule may be more than `most`.
        """
        unit = math.lcm(self.granularity, multiple)
        step = max(most // unit, 1) * unit
        block = 0
        for begin in range(0, numel, step):
            end = min(begin + step, numel)
            yield begin, end, block
            block += self.count(end - begin)

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        return (1, self.block[0]) if len(self.block) == 1 else (self.block[0], self.block[1])

    @cached_property
    def _matrices(self) -> tuple[int, int, int]:
        return _matrices(self.shape) if len(self.block) == 2 else (1, 1, self.numel)

    @cached_property
    def _is_run(self) -> bool:
        """Whether blocks follow each other in memory, so that only the tensor's last one can be short."""
        stack, height, width = self._matrices
        rows, columns = self._sizes
        return stack * height <= 1 or (rows == 1 and width % columns == 0)

    def _piece(self, numel: int) -> tuple[int, int, int]:
        """The matrices whose blocks make up a piece of `numel` elements: (how many, rows, columns)."""
        _, height, width = self._matrices
        if self._is_run or numel == 0:
            return 1, min(numel, 1), numel
        if numel % (whole := self.granularity if self._has_short_ends else width):
            raise VescaleError(f"{self.shape} in blocks {self.block}: a piece of {numel} elements is not n x {whole}")
        return (numel // whole, height, width) if self._has_short_ends else (1, numel // width, width)

    @cached_property
    def _has_short_ends(self) -> bool:
        """Whether every matrix of a stack ends in short blocks."""
        stack, height, _ = self._matrices
        return stack > 1 and height % self._sizes[0] != 0


def _matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(matrices, rows, columns) of a shape."""
    match shape:
        case ():
            return 1, 1, 1
        case (width,):
            return 1, 1, width
        case (stack, height, width):
            return stack, height, width
    return 1, shape[0], math.prod(shape[1:])
