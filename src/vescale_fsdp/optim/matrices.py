"""Which whole matrices a parameter consists of: a shape in, contiguous runs of its flat elements out.

A `Matrix` is always a contiguous run of the row-major parameter, so that a rank's flat shard meets it in one run:

    shape (M, N)                 one matrix
    (E, M, N)                    E matrices (fused experts): a stack, each orthogonalized alone
    (O, I, kh, kw), (O, I, kd, kh, kw)   one matrix (O, I*kh*kw): a convolution's weight
    (O, I, k) with `flatten`     one matrix (O, I*k): a 1-d convolution's weight
    `split=(8, 4, 4)`            each matrix cut into matrices of 8, 4 and 4 rows (fused QKV, gate and up, heads)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vescale_fsdp.errors import VescaleError

__all__ = ["Matrix", "cuts", "matrices_of", "panels_of"]


@dataclass(frozen=True)
class Matrix:
    """`rows` x `columns` elements of tensor number `tensor`, beginning at flat element `begin`."""

    tensor: int
    begin: int
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if min(self.tensor, self.begin, self.rows, self.columns) < 0:
            raise ValueError(f"A matrix needs non-negative tensor, begin, rows and columns, got {self}.")

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.begin + self.numel

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns


def matrices_of(
    shape: Sequence[int],
    *,
    tensor: int = 0,
    split: Sequence[int] | None = None,
    flatten: bool = False,
    fqn: str = "parameter",
) -> tuple[Matrix, ...]:
    """The matrices of a parameter, in memory order; none for a parameter without elements."""
    stack, rows, columns = _stack_rows_columns(tuple(shape), flatten, fqn)
    heights = (rows,) if split is None else tuple(split)
    if split is not None and (sum(heights) != rows or min(heights, default=0) < 1):
        raise VescaleError(
            f"{fqn}: split {heights} does not cut its {rows} rows (shape {tuple(shape)}). "
            f"Give positive row counts that add up to {rows}."
        )
    if stack * rows * columns == 0:
        return ()
    matrices = []
    begin = 0
    for _ in range(stack):
        for height in heights:
            matrices.append(Matrix(tensor, begin, height, columns))
            begin += height * columns
    return tuple(matrices)


def panels_of(matrix: Matrix, most_rows: int) -> tuple[Matrix, ...]:
    """The matrix in panels of at most so many rows, each a contiguous run itself."""
    return tuple(
        Matrix(matrix.tensor, matrix.begin + begin * matrix.columns, end - begin, matrix.columns)
        for begin, end in cuts(matrix.rows, most_rows)
    )


def cuts(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Begin and end of pieces of `most`, of which the last may be smaller."""
    for begin in range(0, size, most):
        yield begin, min(size, begin + most)


def _stack_rows_columns(shape: tuple[int, ...], flatten: bool, fqn: str) -> tuple[int, int, int]:
    if len(shape) < 2:
        raise VescaleError(
            f"{fqn}: expected at least 2 dimensions, got shape {shape}. "
            'Put it into a parameter group with "algorithm": "adamw".'
        )
    if len(shape) == 3 and not flatten:
        return shape
    return 1, shape[0], math.prod(shape[1:])
