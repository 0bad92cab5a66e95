"""Splitting a group into a few flat buffers by granularity, where one would need too common a multiple."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from .bounds import Bounds
from .one_lane import LaneLayout, in_module_order, lay_out
from .parts import Counts, part_copies
from .problem import Problem
from .splits import Splits

__all__ = ["Lane", "lay_out_lanes", "total"]

NUM_TRIES = 16
"""Splits laid out per number of lanes."""

HEAVY = 10
"""A kind with at least one in so many of the elements is tried in a lane of its own."""

PARTED = 1010
"""Copies of one kind are parted where a split needs more than so many thousandths of what any layout needs:"""

NUM_STARTS = 4
"""from so many splits per number of lanes, the least lower bounds first,"""

NUM_PARTED = 4
"""of which so many are laid out."""

Kinds = tuple[int, ...]
"""Indices of a problem's kinds, ascending."""

CountedSplit = tuple[Counts, ...]
"""How many tensors of each kind each lane holds."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One buffer: how many of each kind it holds, these as a problem of their own, and the layout found."""

    counts: Counts
    problem: Problem
    layout: LaneLayout

    @property
    def kinds(self) -> Kinds:
        """Indices in the whole problem of the kinds of this one."""
        return tuple([kind for kind, count in enumerate(self.counts) if count])


def lay_out_lanes(problem: Problem, bounds: Bounds, max_lanes: int, min_saving: int) -> tuple[Lane, ...]:
    """The fewest lanes that are within 0.5 %, or within `min_saving` elements per rank, of the best split found."""
    found = candidates(_Splitter(problem, bounds), max_lanes, min_saving)
    best = total(found[-1])
    return next(lanes for lanes in found if not is_worth_it(total(lanes), best, min_saving))


def is_worth_it(share: int, smaller: int, min_saving: int) -> bool:
    """Whether more lanes may be opened for a smaller share."""
    return share * 1000 > smaller * 1005 and share - smaller >= min_saving


def candidates(splitter: _Splitter, max_lanes: int, min_saving: int) -> list[tuple[Lane, ...]]:
    """The best split found for 1, 2, ... lanes; none for a number of lanes that saves nothing.

    Lanes that could not be chosen even if they met their lower bounds keep their quick layouts.
    """
    found: list[tuple[Lane, ...]] = [(splitter.lane(splitter.bounds.counts),)]
    for num_lanes in range(2, max_lanes + 1):
        if not is_worth_it(total(found[-1]), splitter.least, min_saving):
            break
        split = splitter.best_split(num_lanes, found[-1])
        if split is None or not is_worth_it(least(found[-1]), total(split), min_saving):
            found[-1] = splitter.searched(found[-1])
            if not is_worth_it(total(found[-1]), splitter.least, min_saving):
                return found
        if split is not None and total(split) < total(found[-1]):
            found.append(split)
    return [*found[:-1], splitter.searched(found[-1])]


def total(lanes: Sequence[Lane]) -> int:
    """Share per rank of all lanes together."""
    return sum([lane.layout.share for lane in lanes])


def least(lanes: Sequence[Lane]) -> int:
    """The share per rank below which these lanes have no layout."""
    return sum([lane.layout.bound for lane in lanes])


class _Splitter:
    """Layouts of lanes, each computed once."""

    def __init__(self, problem: Problem, bounds: Bounds) -> None:
        self.problem = problem
        self.bounds = bounds
        self.least = bounds.any_layout()
        self.lanes: dict[Counts, Lane] = {}
        self.final: dict[Counts, Lane] = {}

    @cached_property
    def splits(self) -> Splits:
        return Splits(self.bounds, self.least)

    def lane(self, counts: Counts) -> Lane:
        """With a quick layout."""
        if counts not in self.lanes:
            problem = self.problem if counts == self.bounds.counts else self.problem.part(counts)
            self.lanes[counts] = Lane(counts, problem, lay_out(problem, self.lower_bound(counts), search_steps=0))
        return self.lanes[counts]

    def lower_bound(self, counts: Counts) -> Callable[[int], int]:
        return partial(self.bounds.one_buffer, counts)

    def searched(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        """The lanes with the best layouts that the budgets find, the largest first."""
        return tuple(sorted(map(self._searched, lanes), key=lambda lane: (-lane.layout.share, lane.kinds)))

    def _searched(self, lane: Lane) -> Lane:
        if lane.counts not in self.final:
            layout = lane.layout
            if layout.share > layout.bound:
                layout = lay_out(lane.problem, self.lower_bound(lane.counts))
            self.final[lane.counts] = replace(lane, layout=in_module_order(lane.problem, layout))
        return self.final[lane.counts]

    def best_split(self, num_lanes: int, lanes: Sequence[Lane]) -> tuple[Lane, ...] | None:
        """The least split found into `num_lanes`, if its share is less than that of these fewer lanes."""
        splits = [tuple(map(self.bounds.all_of, split)) for split in self.splits.of(num_lanes)]
        best = self.first_of([*splits, *self.with_one_alone(lanes)], total(lanes), NUM_TRIES)
        below = total(lanes) if best is None else total(best)
        if below * 1000 <= self.least * PARTED or not any(count > 1 for count in self.bounds.counts):
            return best
        held = [lane.counts for lane in best or lanes]
        splits.sort(key=self.needed)
        starts = [*splits[:NUM_STARTS], (*held, (0,) * len(self.bounds.counts))[:num_lanes]]
        enough = below * 1000 // 1005
        parted = [part_copies(self.bounds, start, enough) for start in dict.fromkeys(starts)]
        return self.first_of([split for split in parted if split], below, NUM_PARTED) or best

    def needed(self, split: CountedSplit) -> int:
        return sum([self.bounds.of_counts(counts) for counts in split])

    def first_of(self, splits: Iterable[CountedSplit], below: int, num_tries: int) -> tuple[Lane, ...] | None:
        """The least of these splits if it is below a share; the least by their estimates are laid out first."""
        waiting = [(self.estimate(split), split) for split in dict.fromkeys(splits)]
        heapq.heapify(waiting)
        best = None
        while waiting and waiting[0][0] < below and num_tries:
            known, split = heapq.heappop(waiting)
            if (estimate := self.estimate(split)) > known:  # one of its lanes was laid out since
                heapq.heappush(waiting, (estimate, split))
                continue
            num_tries -= 1
            tried = tuple(map(self.lane, split))
            if total(tried) < below:
                best, below = tried, total(tried)
        return best

    def estimate(self, split: CountedSplit) -> int:
        """Shares of the lanes that are laid out, lower bounds of the others: a bad lane is met only once."""
        lanes, bound = self.lanes, self.bounds.of_counts
        return sum([lanes[counts].layout.share if counts in lanes else bound(counts) for counts in split])

    def with_one_alone(self, lanes: Sequence[Lane]) -> Iterator[CountedSplit]:
        """The lanes with a kind that holds much of the group, such as the experts, in a new lane of its own."""
        heavy = self.problem.numel // HEAVY
        for at, lane in enumerate(lanes):
            others = [other.counts for other in (*lanes[:at], *lanes[at + 1 :])]
            for i in lane.kinds:
                if self.problem.kinds[i].numel * lane.counts[i] >= heavy and len(lane.kinds) > 1:
                    alone = tuple([count if j == i else 0 for j, count in enumerate(lane.counts)])
                    rest = tuple([0 if j == i else count for j, count in enumerate(lane.counts)])
                    yield (*others, rest, alone)
