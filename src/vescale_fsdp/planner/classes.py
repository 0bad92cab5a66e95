"""Shares by divisibility: in the class of L, shares are multiples of L and blocks that divide L may span many ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .greedy import NOWHERE, end_of
from .problem import Order, Problem

__all__ = ["MAX_CLASSES", "ShareClass", "share_classes"]

MAX_CLASSES = 256
"""Real groups have 1 to 13."""


@dataclass(frozen=True, slots=True)
class ShareClass:
    """Multiples of `divisor`, from `bound` on. On them, feasibility is monotone in the share for every order."""

    divisor: int
    bound: int
    spans_ranks: tuple[bool, ...]

    def fits(self, problem: Problem, order: Order, share: int) -> bool:
        return end_of(order, problem.kinds, self.spans_ranks, share, problem.num_ranks * share) != NOWHERE

    def least_share(self, problem: Problem, order: Order, below: int) -> int:
        """The least share of this class in which the order fits, if it is less than `below`; else NOWHERE."""
        low, high = self.bound, (below - 1) // self.divisor * self.divisor
        if high < low or not self.fits(problem, order, high):
            return NOWHERE
        step = 0
        while low + step * self.divisor < high:  # the bound is often met: search upwards from it
            middle = low + step * self.divisor
            if self.fits(problem, order, middle):
                high = middle
                break
            low, step = middle + self.divisor, 2 * step + 1
        while low < high:
            middle = low + (high - low) // self.divisor // 2 * self.divisor
            if self.fits(problem, order, middle):
                high = middle
            else:
                low = middle + self.divisor
        return high


def share_classes(problem: Problem, at_least: int, below: int) -> Sequence[ShareClass]:
    """Classes that may hold a share in [at_least, below), by ascending bound.

    The divisors are the lcm closure of the unit and the granularities of tensors larger than a share: smaller ones
    never cross two boundaries. The least share of any order lies in one of these classes.
    """
    divisors = {problem.unit}
    for granularity in sorted({kind.granularity for kind in problem.kinds if kind.numel > at_least + 1}):
        joined = (math.lcm(divisor, granularity) for divisor in sorted(divisors))
        divisors.update([divisor for divisor in joined if divisor < below][: MAX_CLASSES - len(divisors)])
    cuts = [(kind.granularity, kind.smallest_single_cut_share) for kind in problem.kinds]
    classes = [_share_class(problem, cuts, divisor, at_least) for divisor in divisors]
    return sorted([c for c in classes if c.bound < below], key=lambda c: (c.bound, c.divisor))


def _share_class(problem: Problem, cuts: Sequence[tuple[int, int]], divisor: int, at_least: int) -> ShareClass:
    """`cuts`: each kind's granularity and the least share where its tensors are cut once."""
    spans_ranks = tuple([divisor % granularity == 0 for granularity, _ in cuts])
    least = max([at_least, *[single for granularity, single in cuts if divisor % granularity]])
    return ShareClass(divisor, problem.round_up(least, divisor), spans_ranks)
