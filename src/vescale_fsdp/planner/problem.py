"""The planner's problem in its smallest form: kinds of tensors with counts, everything divided by the alignment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Kind", "Order", "Problem"]

Order = tuple[tuple[int, int], ...]
"""Which tensors follow each other in the buffer: runs of (index of the kind, how many of it)."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`count` tensors of `numel` elements that may be cut every `granularity` of them."""

    numel: int
    granularity: int
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
    def reduce(
        cls, numels: Sequence[int], granularities: Sequence[int], num_ranks: int, unit: int, align: int
    ) -> Problem:
        """Drop empty tensors, divide by `align`, merge equal tensors. The unit becomes a multiple of `align`."""
        index_of: dict[tuple[int, int], int] = {}
        counts: list[int] = []
        runs: list[list[int]] = []
        for pair in zip(numels, granularities, strict=True):
            if not pair[0]:
                continue
            index = index_of.get(pair)
            if index is None:
                index = index_of[pair] = len(counts)
                counts.append(0)
            counts[index] += 1
            if runs and runs[-1][0] == index:
                runs[-1][1] += 1
            else:
                runs.append([index, 1])
        kinds = tuple(Kind(*divide(*pair, align), count) for pair, count in zip(index_of, counts, strict=True))
        return cls(num_ranks, math.lcm(unit, align) // align, kinds, tuple((index, count) for index, count in runs))

    @property
    def numel(self) -> int:
        return sum(kind.numel * kind.count for kind in self.kinds)

    def round_up(self, share: int, divisor: int = 1) -> int:
        """Least multiple of the unit (and of `divisor`) that is at least `share`."""
        step = math.lcm(self.unit, divisor)
        return -(-share // step) * step


def divide(numel: int, granularity: int, align: int) -> tuple[int, int]:
    """Size and granularity in units of `align` elements; a granularity that covers the tensor is the tensor."""
    size = -(-numel // align)
    run = size if granularity >= numel else math.lcm(granularity, align) // align
    return size, min(run, size)
