"""Which rank owns which panel of a matrix, so that what a rank owns is one run of the parameter's state.

w has 4 panels, one axis of 3 ranks:   LPT's owners   2 0 1 0   become   0 0 1 2

Over several axes, a (2, 4) mesh say, the owners of one parameter stand on one line of ranks along the longest axis:

    ranks   0 1 2 3     u: panels on line 0     0 0 1 2 3
            4 5 6 7     v: panels on line 1     4 5 5 6 7
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .matrices import Matrix
from .owners import select_owners
from .route import Coordinate
from .terms import ravel, unravel

__all__ = ["ascending_owners"]


def ascending_owners(
    matrices: Sequence[Matrix],
    owners: Sequence[int],
    whole: Sequence[int | None],
    *,
    sizes: Coordinate = (),
    costs: Sequence[int] = (),
) -> list[int]:
    """Owners that never descend along a parameter, so that what a rank owns is one run of the parameter's state.

    A panel that lies whole on a rank (`whole`) stays there. Over several axes (`sizes`) the owners are chosen anew, by
    `costs`: a line of ranks for each parameter, then a rank of the line for each of its panels.
    """
    by_tensor: dict[int, list[int]] = defaultdict(list)
    for number in sorted(range(len(matrices)), key=lambda number: matrices[number].begin):
        by_tensor[matrices[number].tensor].append(number)
    if len(sizes) > 1:
        owners, whole = _Lines(sizes).choose(list(by_tensor.values()), whole, costs)
    ordered = list(owners)
    for numbers in by_tensor.values():
        ascending = _ascending([owners[number] for number in numbers], [whole[number] for number in numbers])
        for number, owner in zip(numbers, ascending, strict=True):
            ordered[number] = owner
    return ordered


def _ascending(owners: Sequence[int], pinned: Sequence[int | None]) -> list[int]:
    """`owners` sorted between the pinned ones, and within their bounds; all sorted when the pinned ones descend."""
    fixed = [owner for owner in pinned if owner is not None]
    if fixed != sorted(fixed):
        return sorted(owners)
    result: list[int] = []
    free: list[int] = []
    low = 0
    for owner, pin in [*zip(owners, pinned, strict=True), (0, max(owners, default=0))]:
        if pin is None:
            free.append(owner)
            continue
        result += [min(max(each, low), pin) for each in sorted(free)]
        result.append(pin)
        free, low = [], pin
    return result[:-1]


@dataclass(frozen=True)
class _Lines:
    """Ranks numbered row-major over axes of `sizes`, as lines along the longest axis."""

    sizes: Coordinate

    def choose(
        self, tensors: Sequence[Sequence[int]], whole: Sequence[int | None], costs: Sequence[int]
    ) -> tuple[list[int], list[int | None]]:
        """Owners of all panels, and which of them have to stay; `tensors`: the panels of each."""
        homes = [self._home([whole[number] for number in numbers]) for numbers in tensors]
        prices = [sum(costs[number] for number in numbers) for numbers in tensors]
        num_lines = math.prod(self.sizes) // self.sizes[self._axis]
        lines = select_owners(prices, num_lines, whole=homes).owners
        owners, stays = [0] * len(costs), list[int | None]([None] * len(costs))
        for line in range(num_lines):
            members = [(t, n) for t, numbers in enumerate(tensors) if lines[t] == line for n in numbers]
            for tensor, number in members:
                stays[number] = whole[number] if homes[tensor] == line else None
            stay = [stays[number] for _, number in members]
            at = [None if rank is None else self._split(rank)[1] for rank in stay]
            chosen = select_owners([costs[n] for _, n in members], self.sizes[self._axis], whole=at).owners
            for (_, number), position in zip(members, chosen, strict=True):
                owners[number] = self._join(line, position)
        return owners, stays

    @property
    def _axis(self) -> int:
        return self.sizes.index(max(self.sizes))

    def _home(self, whole: Sequence[int | None]) -> int | None:
        """The line on which all panels lie that lie whole on a rank, if it is one."""
        lines = {self._split(rank)[0] for rank in whole if rank is not None}
        return lines.pop() if len(lines) == 1 else None

    def _split(self, rank: int) -> tuple[int, int]:
        """The line, numbered row-major over the other axes, and the position on it."""
        at = unravel(rank, self.sizes)
        rest = at[: self._axis] + at[self._axis + 1 :]
        return ravel(rest, self._others), at[self._axis]

    def _join(self, line: int, position: int) -> int:
        rest = unravel(line, self._others)
        return ravel((*rest[: self._axis], position, *rest[self._axis :]), self.sizes)

    @property
    def _others(self) -> Coordinate:
        return self.sizes[: self._axis] + self.sizes[self._axis + 1 :]
