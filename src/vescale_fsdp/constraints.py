"""Constraints that need no plugin: whole rows, blocks and tensors, registered through the hooks that plugins use."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import PlanError
from .hookspecs import LayoutConstraint, hookimpl

__all__ = ["Blocks", "Matrices", "Rows", "Whole", "vescale_layout_constraints"]


@dataclass(frozen=True)
class Rows:
    """`rows:16`: cuts every 16 rows of a matrix, `rows`: between any two.

    A tensor of one dim has rows of one element. Experts stacked as (experts, rows, columns) are cut inside none of them
    where the rows do not divide evenly: the expert then stays whole.
    """

    name: str = "rows"

    def numel(self, shape: tuple[int, ...], size: tuple[int, ...]) -> int:
        (rows,) = _sizes(self.name, size, default=(1,))
        return _rows(shape, rows)


@dataclass(frozen=True)
class Blocks:
    """`blocks:128x128`: whole blocks of a matrix, so cuts every 128 rows; nothing for tensors of fewer dims."""

    name: str = "blocks"

    def numel(self, shape: tuple[int, ...], size: tuple[int, ...]) -> int:
        rows, _ = _sizes(self.name, size, default=(128, 128))
        return _rows(shape, rows) if len(shape) > 1 else 1


@dataclass(frozen=True)
class Whole:
    """`whole`: one rank holds the tensor."""

    name: str = "whole"

    def numel(self, shape: tuple[int, ...], size: tuple[int, ...]) -> int:
        _sizes(self.name, size, default=())
        return max(math.prod(shape), 1)


@dataclass(frozen=True)
class Matrices:
    """`muon`: one rank holds each matrix, of a stack of experts each expert; nothing for tensors of fewer dims."""

    name: str = "muon"

    def numel(self, shape: tuple[int, ...], size: tuple[int, ...]) -> int:
        _sizes(self.name, size, default=())
        return max(math.prod(shape[1:] if len(shape) == 3 else shape), 1) if len(shape) > 1 else 1


@hookimpl
def vescale_layout_constraints() -> Iterable[LayoutConstraint]:
    return (Rows(), Blocks(), Whole(), Matrices())


def _rows(shape: tuple[int, ...], rows: int) -> int:
    if len(shape) == 3:
        _, height, width = shape
        return max((rows if height % rows == 0 else height) * width, 1)
    return max(rows * math.prod(shape[1:]), 1) if shape else 1


def _sizes(name: str, size: tuple[int, ...], *, default: tuple[int, ...]) -> tuple[int, ...]:
    size = size or default
    if len(size) != len(default) or any(number < 1 for number in size):
        example = f"{name}:{'x'.join(map(str, default))}" if default else name
        raise PlanError(f"{name}: expected a wish such as {example!r}, got sizes {size}")
    return size
