"""The least share of one flat buffer: bounds, then orders, dives and beams until bound or budget is met."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .beam import beam_search
from .bounds import COARSE, SHARP
from .classes import MAX_CLASSES, ShareClass, share_classes
from .dives import dive, preferences
from .greedy import NOWHERE, end_of
from .orders import moved_orders, sorted_orders
from .problem import Order, Problem
from .targets import Targets

__all__ = ["LaneLayout", "in_module_order", "lay_out"]

NUM_DIVES = 4
"""Targets per class and preference, by bisection."""

# Budgets are counts of placements tried, never times: every rank must find the same plan.

MOVE_STEPS = 10_000
"""By orders in which one kind was moved."""

BEAM_STEPS = 60_000
"""By one beam, at one share; a search that needs fewer is complete."""

SEARCH_STEPS = 150_000
"""By all beams of one search."""

NEAR = 1_000
"""A gap below one in this many is worth fewer steps,"""

NEAR_STEPS = 48_000

NEGLIGIBLE = 10_000
"""and one below one in this many none, unless"""

PROOF_STEPS = 20_000
"""prove that there is no gap."""


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """The order fits this share, cut at several boundaries only where `spans_ranks`; below `bound` nothing fits."""

    share: int
    bound: int
    order: Order
    spans_ranks: tuple[bool, ...]


def lay_out(problem: Problem, lower_bound: Callable[[int], int], *, search_steps: int = SEARCH_STEPS) -> LaneLayout:
    """The best layout in one buffer that the budgets find; a quick one, without a search over orders, at 0 steps.

    `lower_bound(COARSE)` and `lower_bound(SHARP)` are shares below which there is none.
    """
    search = _Search(problem, lower_bound, search_steps)
    searches = [search.try_sorted_orders, search.try_dives]
    if search_steps:
        searches += [search.sharpen_bounds, search.try_module_order, search.try_moves, search.try_beams]
    for improve in searches:
        if search.share == search.bound:
            break
        improve()
    return LaneLayout(search.share, search.bound, search.order, search.spans_ranks)


def in_module_order(problem: Problem, layout: LaneLayout) -> LaneLayout:
    """The same share with the tensors in the order of the module if that fits, so that plans look like the model."""
    spans_ranks = tuple([layout.share % kind.granularity == 0 for kind in problem.kinds])
    limit = problem.num_ranks * layout.share
    if end_of(problem.module_order, problem.kinds, spans_ranks, layout.share, limit) == NOWHERE:
        return layout
    return LaneLayout(layout.share, layout.bound, problem.module_order, spans_ranks)


class _Search:
    """The best order so far, and the share that nothing beats."""

    def __init__(self, problem: Problem, lower_bound: Callable[[int], int], search_steps: int) -> None:
        self.problem = problem
        self.lower_bound = lower_bound
        self.bound = lower_bound(COARSE)
        self.share = problem.round_up(problem.numel)  # everything on rank 0
        self.order: Order = tuple([(i, kind.count) for i, kind in enumerate(problem.kinds)])
        self.spans_ranks = (False,) * len(problem.kinds)
        self.classes = share_classes(problem, self.bound, self.share + 1)
        self.steps_left = search_steps

    def offer(self, share_class: ShareClass, order: Order | None) -> int:
        """The least share of this class in which the order fits; kept if it is the best so far."""
        if order is None:
            return self.share
        least = share_class.least_share(self.problem, order, self.share)
        if least < self.share:
            self.share, self.order, self.spans_ranks = least, order, share_class.spans_ranks
        return least

    def try_sorted_orders(self) -> None:
        """By granularity and by size."""
        for share_class in self.classes:
            if share_class.bound >= self.share:
                break
            for order in sorted_orders(self.problem, share_class.spans_ranks):
                self.offer(share_class, order)
                if share_class.bound >= self.share:
                    break

    def try_module_order(self) -> None:
        for share_class in self.classes:
            if share_class.bound >= self.share:
                break
            self.offer(share_class, self.problem.module_order)

    def try_dives(self) -> None:
        for share_class in self.classes:
            if share_class.bound >= self.share:
                break
            for preference in dict.fromkeys(preferences(self.problem, share_class)):
                num_dives = NUM_DIVES if self.steps_left else 1
                self.bisect(share_class, partial(dive, self.problem, share_class, preference), num_dives)

    def try_moves(self) -> None:
        """Move one kind in the sorted orders."""
        tries = MOVE_STEPS // sum(kind.count for kind in self.problem.kinds)
        for share_class in self.classes:
            if share_class.bound >= self.share:
                break
            orders = dict.fromkeys(sorted_orders(self.problem, share_class.spans_ranks))
            moved = dict.fromkeys(moved for order in orders for moved in moved_orders(order))
            for order in itertools.islice(moved, tries):
                if share_class.bound >= self.share:
                    break
                tries -= 1
                self.offer(share_class, order)

    def bisect(self, share_class: ShareClass, make_order: Callable[[int], Order | None], num_tries: int) -> None:
        """Make orders for shares between the class's bound and the best, halving the distance each time."""
        target = low = share_class.bound
        while low < self.share and num_tries:
            if self.offer(share_class, make_order(target)) > target:
                low = target + share_class.divisor
            target = low + (self.share - low) // share_class.divisor // 2 * share_class.divisor
            num_tries -= 1

    def sharpen_bounds(self) -> None:
        self.bound = self.lower_bound(SHARP)
        self.classes = share_classes(self.problem, self.bound, self.share)

    def is_within(self, fraction: int) -> bool:
        """Whether the best share is above the bound by at most one in `fraction`."""
        return self.share * fraction <= self.bound * (fraction + 1)

    @property
    def worth_a_beam(self) -> bool:
        """Steps are left for a gap of this size; a search over few states is a proof at any size."""
        if self.steps_left <= 0 or self.is_within(NEGLIGIBLE):
            return self.problem.num_steps <= PROOF_STEPS and self.steps_left > 0
        return not self.is_within(NEAR) or self.steps_left > SEARCH_STEPS - NEAR_STEPS

    def try_beams(self) -> None:
        """Search all orders, class by class in turns, between the class's bound and the best share.

        Where a search is complete and finds nothing, no smaller share of the class fits either, and the bound rises.
        """
        are_complete = self.problem.num_steps <= BEAM_STEPS // 2
        targets = [Targets(share_class, are_complete=are_complete) for share_class in self.classes]
        waiting = deque(targets)
        while waiting and self.worth_a_beam:
            tried = waiting.popleft()
            target = tried.next(self.share)
            if target is None:
                continue
            beam = beam_search(self.problem, tried.share_class, target, max_steps=BEAM_STEPS)
            self.steps_left -= beam.num_steps
            if self.offer(tried.share_class, beam.order) <= target:
                tried.hit()
            else:
                tried.missed(target, complete=beam.complete)
            waiting.append(tried)
        if len(self.classes) < MAX_CLASSES:
            self.bound = max(self.bound, min([self.share, *(tried.proved for tried in targets)]))
