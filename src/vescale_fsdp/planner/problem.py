"""The planner's problem in its smallest form: kinds of tensors with counts, everything divided by the alignment."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Kind", "Order", "Problem", "Tensor", "in_runs"]

Tensor = tuple[int, int, int]
"""Elements, how many of them may not be cut, and how many make a row, between which cuts are preferred."""

Order = tuple[tuple[int, int], ...]
"""Which tensors follow each other in the buffer: runs of (index of the kind, how many of it)."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`count` tensors of `numel` elements that may be cut every `granularity` of them, better every `row`."""

    numel: int
    granularity: int
    row: int
    count: int

    @property
    def smallest_single_cut_share(self) -> int:
        """Least share where one cut is enough: numel <= share + floor(share / granularity) * granularity."""
        blocks = -(-(self.numel + 1 - self.granularity) // (2 * self.granularity))
        return max(blocks * self.granularity, self.numel - blocks * self.granularity)


@dataclass(frozen=True)
class Problem:
    """Least share, a multiple of `unit`, such that `num_ranks` equal shares hold all tensors without an illegal cut.

    Alignment is gone: sizes, granularities and unit were divided by it, which loses nothing. The tensors are those of
    a module, or the first `part_of[kind]` of each kind that the module has.
    """

    num_ranks: int
    unit: int
    kinds: tuple[Kind, ...]
    kinds_of_module: tuple[int, ...]
    """The kind of each of the module's tensors, in the module's numbering of kinds, in the order they came."""
    part_of: tuple[int, ...]

    @classmethod
    def reduce(cls, tensors: Sequence[Tensor], num_ranks: int, unit: int, align: int) -> Problem:
        """Drop empty tensors, divide by `align`, merge equal tensors. The unit becomes a multiple of `align`."""
        filled = [tensor for tensor in tensors if tensor[0]]
        divided = {tensor: divide(*tensor, align) for tensor in dict.fromkeys(filled)}
        index_of = {kind: index for index, kind in enumerate(dict.fromkeys(divided.values()))}
        kind_of = {tensor: index_of[kind] for tensor, kind in divided.items()}  # different tensors may be of one kind
        kinds_of_module = tuple(map(kind_of.__getitem__, filled))
        counts = Counter(kinds_of_module)
        kinds = tuple([Kind(*kind, counts[index]) for kind, index in index_of.items()])
        part_of = tuple([kind.count for kind in kinds])
        return cls(num_ranks, math.lcm(unit, align) // align, kinds, kinds_of_module, part_of)

    def part(self, counts: tuple[int, ...]) -> Problem:
        """The problem of so many tensors of each of the module's kinds; kinds without any are left out."""
        chosen = zip(self.kinds, counts, strict=True)
        kinds = tuple([Kind(kind.numel, kind.granularity, kind.row, count) for kind, count in chosen if count])
        return Problem(self.num_ranks, self.unit, kinds, self.kinds_of_module, counts)

    @cached_property
    def module_order(self) -> Order:
        """The order in which the tensors came, the first of each kind."""
        index_of = {kind: index for index, kind in enumerate([i for i, count in enumerate(self.part_of) if count])}
        left, kinds = list(self.part_of), []
        for kind in self.kinds_of_module:
            if left[kind]:
                left[kind] -= 1
                kinds.append(index_of[kind])
        return in_runs(kinds)

    @cached_property
    def numel(self) -> int:
        return sum([kind.numel * kind.count for kind in self.kinds])

    @property
    def num_steps(self) -> int:
        """Placements that a complete search over all orders tries at most, at one share."""
        return len(self.kinds) * math.prod([kind.count + 1 for kind in self.kinds])

    def round_up(self, share: int, divisor: int = 1) -> int:
        """Least multiple of the unit (and of `divisor`) that is at least `share`."""
        step = math.lcm(self.unit, divisor)
        return -(-share // step) * step


def in_runs(kinds: Iterable[int]) -> Order:
    """Neighbours of one kind as one run."""
    runs: list[tuple[int, int]] = []
    last, count = -1, 0
    for kind in kinds:
        if kind == last:
            count += 1
        else:
            runs.append((last, count))
            last, count = kind, 1
    return (*runs[1:], (last, count)) if runs else ()


def divide(numel: int, granularity: int, row: int, align: int) -> Tensor:
    """Size, granularity and row in units of `align` elements; a granularity that covers the tensor is the tensor."""
    size = -(-numel // align)
    run = size if granularity >= numel else math.lcm(granularity, align) // align
    rows = math.lcm(granularity, row, align) // align if run < size else size
    return size, min(run, size), min(rows, size)
