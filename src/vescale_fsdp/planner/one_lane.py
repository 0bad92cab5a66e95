"""The least share of one flat buffer: bounds, classes, orders."""

from __future__ import annotations

from dataclasses import dataclass

from .bounds import any_layout_bound, forced_bound
from .classes import share_classes
from .dives import dive, preferences
from .orders import sorted_orders
from .problem import Order, Problem

__all__ = ["LaneLayout", "lay_out"]

NUM_TARGETS = 4


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """A share that the order fits, no share below `bound` fits any order."""

    share: int
    bound: int
    order: Order
    spans_ranks: tuple[bool, ...]


def lay_out(problem: Problem) -> LaneLayout:
    """Search until the share meets its lower bound or the budgets, which are counts, are spent."""
    bound = forced_bound(problem, any_layout_bound(problem))
    share = problem.round_up(problem.numel)  # everything on rank 0
    order, spans_ranks = problem.module_order, (False,) * len(problem.kinds)
    classes = share_classes(problem, bound, share + 1)
    for share_class in classes:
        for candidate in sorted_orders(problem, share_class):
            if share_class.bound >= share:
                break
            least = share_class.least_share(problem, candidate, share)
            if least < share:
                share, order, spans_ranks = least, candidate, share_class.spans_ranks
    for share_class in classes:
        for preference in dict.fromkeys(preferences(problem, share_class)):
            low, tries = share_class.bound, 0
            target = low
            while low < share and tries < NUM_TARGETS:
                candidate = dive(problem, share_class, target, preference)
                tries += 1
                least = share_class.least_share(problem, candidate, share) if candidate else share
                if least < share:
                    share, order, spans_ranks = least, candidate, share_class.spans_ranks
                if least > target:
                    low = target + share_class.divisor
                target = low + (share - low) // share_class.divisor // 2 * share_class.divisor
    return LaneLayout(share, bound, order, spans_ranks)
