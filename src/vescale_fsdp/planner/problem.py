"""The planner's problem in its smallest form: kinds of tensors with counts, everything divided by the alignment."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = ["Kind", "Order", "Problem", "Tensor"]

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


@dataclass(frozen=True, slots=True)
class Problem:
    """Least share, a multiple of `unit`, such that `num_ranks` equal shares hold all tensors without an illegal cut.

    Alignment is gone: sizes, granularities and unit were divided by it, which loses nothing. `module_order` is the
    order in which the tensors came.
    """

    num_ranks: int
    unit: int
    kinds: tuple[Kind, ...]
    module_order: Order

    @classmethod
    def reduce(cls, tensors: Sequence[Tensor], num_ranks: int, unit: int, align: int) -> Problem:
        """Drop empty tensors, divide by `align`, merge equal tensors. The unit becomes a multiple of `align`."""
        counts = Counter([tensor for tensor in tensors if tensor[0]])  # ordered by first appearance
        index_of = {tensor: index for index, tensor in enumerate(counts)}
        kinds = tuple([Kind(*divide(*tensor, align), count) for tensor, count in counts.items()])
        runs = [(index_of[tensor], 1) for tensor in tensors if tensor[0]]
        return cls(num_ranks, math.lcm(unit, align) // align, kinds, merged(runs))

    def part(self, counts: Sequence[int]) -> Problem:
        """The problem of so many tensors of each kind, the first of the module; kinds without any are left out."""
        kept = [kind for kind, count in enumerate(counts) if count]
        new_index, left = {kind: index for index, kind in enumerate(kept)}, list(counts)
        runs = []
        for kind, number in self.module_order:
            if taken := min(number, left[kind]):
                runs.append((new_index[kind], taken))
                left[kind] -= taken
        kinds = tuple([replace(self.kinds[kind], count=counts[kind]) for kind in kept])
        return replace(self, kinds=kinds, module_order=merged(runs))

    @property
    def numel(self) -> int:
        return sum(kind.numel * kind.count for kind in self.kinds)

    @property
    def num_steps(self) -> int:
        """Placements that a complete search over all orders tries at most, at one share."""
        return len(self.kinds) * math.prod(kind.count + 1 for kind in self.kinds)

    def round_up(self, share: int, divisor: int = 1) -> int:
        """Least multiple of the unit (and of `divisor`) that is at least `share`."""
        step = math.lcm(self.unit, divisor)
        return -(-share // step) * step


def merged(runs: Iterable[tuple[int, int]]) -> Order:
    """Neighbouring runs of one kind as one run."""
    found: list[tuple[int, int]] = []
    last = -1
    for kind, count in runs:
        if kind == last:
            found[-1] = (kind, found[-1][1] + count)
        else:
            found.append((kind, count))
            last = kind
    return tuple(found)


def divide(numel: int, granularity: int, row: int, align: int) -> tuple[int, int, int]:
    """Size, granularity and row in units of `align` elements; a granularity that covers the tensor is the tensor."""
    size = -(-numel // align)
    run = size if granularity >= numel else math.lcm(granularity, align) // align
    rows = math.lcm(granularity, row, align) // align if run < size else size
    return size, min(run, size), min(rows, size)
