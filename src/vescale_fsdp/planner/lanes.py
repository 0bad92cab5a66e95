"""Splitting a group into a few flat buffers by granularity, where one would need too common a multiple."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from .bounds import Bounds, mask_of
from .one_lane import LaneLayout, lay_out
from .parts import Counts, part_copies
from .problem import Problem

__all__ = ["Lane", "lay_out_lanes", "total"]

MAX_FAMILIES = 6
"""Granularities told apart: more are merged, the cheapest pair first."""

NUM_SEEDS = 10
"""Splits of families per number of lanes that the small tensors are added to, the least lower bounds first."""

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

Split = tuple[Kinds, ...]
"""The kinds of each lane."""

CountedSplit = tuple[Counts, ...]
"""How many tensors of each kind each lane holds."""

Masks = tuple[int, ...]
"""The kinds of each lane, a bit per kind."""


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
    """Lower bounds and layouts of lanes, each computed once."""

    def __init__(self, problem: Problem, bounds: Bounds) -> None:
        self.problem = problem
        self.bounds = bounds
        self.moved: dict[Masks, Masks] = {}
        self.everything = tuple(range(len(problem.kinds)))
        self.least = bounds.any_layout()
        self.lanes: dict[Counts, Lane] = {}
        self.final: dict[Counts, Lane] = {}
        self.masks: dict[Kinds, int] = {}
        self.kinds: dict[int, Kinds] = {}
        self.counts: dict[Kinds, Counts] = {}

    def bound(self, kinds: Kinds) -> int:
        return self.bounds.of_mask(self.mask_of(kinds))

    def mask_of(self, kinds: Kinds) -> int:
        """A lane as one number, a bit per kind: sets of kinds are compared often."""
        if kinds not in self.masks:
            self.masks[kinds] = sum([1 << kind for kind in kinds])
        return self.masks[kinds]

    def kinds_in(self, mask: int) -> Kinds:
        if mask not in self.kinds:
            self.kinds[mask] = tuple([kind for kind in self.everything if mask >> kind & 1])
        return self.kinds[mask]

    def all_of(self, kinds: Kinds) -> Counts:
        """All tensors of these kinds."""
        if kinds not in self.counts:
            self.counts[kinds] = self.bounds.all_of(self.mask_of(kinds))
        return self.counts[kinds]

    def lane(self, counts: Counts) -> Lane:
        """With a quick layout."""
        if counts not in self.lanes:
            problem = self.problem if counts == self.bounds.counts else self.problem.part(counts)
            self.lanes[counts] = Lane(counts, problem, lay_out(problem, self.lower_bound(counts), search_steps=0))
        return self.lanes[counts]

    def lower_bound(self, counts: Counts) -> Callable[[int], int]:
        return partial(self.bounds.one_buffer, mask_of(counts), counts)

    def searched(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        """The lanes with the best layouts that the budgets find, the largest first."""
        return tuple(sorted(map(self._searched, lanes), key=lambda lane: (-lane.layout.share, lane.kinds)))

    def _searched(self, lane: Lane) -> Lane:
        if lane.layout.share == lane.layout.bound:
            return lane
        if lane.counts not in self.final:
            layout = lay_out(lane.problem, self.lower_bound(lane.counts))
            self.final[lane.counts] = replace(lane, layout=layout)
        return self.final[lane.counts]

    def best_split(self, num_lanes: int, lanes: Sequence[Lane]) -> tuple[Lane, ...] | None:
        """The least split found into `num_lanes`, if its share is less than that of these fewer lanes."""
        seeds = [variant for seed in self.seeds(num_lanes) for variant in self.variants(seed)]
        splits = list(dict.fromkeys(tuple(map(self.all_of, split)) for split in seeds))
        best = self.first_of([*splits, *self.with_one_alone(lanes)], total(lanes), NUM_TRIES)
        below = total(lanes) if best is None else total(best)
        if below * 1000 <= self.least * PARTED or not any(count > 1 for count in self.bounds.counts):
            return best
        held = [lane.counts for lane in best or lanes]
        splits.sort(key=self.needed)
        starts = [*splits[:NUM_STARTS], (*held, (0,) * len(self.everything))[:num_lanes]]
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

    def seeds(self, num_lanes: int) -> list[Split]:
        """Ways to put the families into lanes, one of which may wait for small kinds only."""
        families = self.families()
        seeds = [*partitions(families, num_lanes), *((*split, ()) for split in partitions(families, num_lanes - 1))]
        return sorted(seeds, key=lambda seed: (sum(map(self.bound, seed)), seed))[:NUM_SEEDS]

    def variants(self, seed: Split) -> Iterator[Split]:
        """The families' lanes with the small kinds: all in the last lane, or each where it costs least; then moved."""
        fillers = tuple([i for i, kind in enumerate(self.problem.kinds) if kind.numel <= self.least])
        for split in ((*seed[:-1], tuple(sorted(seed[-1] + fillers))), self.with_fillers(seed, fillers)):
            if all(split):
                yield split
                yield tuple(map(self.kinds_in, self.with_moves(tuple(map(self.mask_of, split)))))

    def families(self) -> list[Kinds]:
        """Kinds larger than an average share, by granularity."""
        by_granularity: dict[int, list[int]] = {}
        for i, kind in enumerate(self.problem.kinds):
            if kind.numel > self.least:
                by_granularity.setdefault(kind.granularity, []).append(i)
        families = [tuple(kinds) for _, kinds in sorted(by_granularity.items())]
        while len(families) > MAX_FAMILIES:
            families = self.merge_cheapest(families)
        return families

    def merge_cheapest(self, families: Sequence[Kinds]) -> list[Kinds]:
        """Two families as one: the pair whose common buffer adds least to what each needs alone."""
        pairs = [(one, two) for i, one in enumerate(families) for two in families[i + 1 :]]
        one, two = min(pairs, key=lambda pair: (self.added(*pair), pair))
        return [*(family for family in families if family not in (one, two)), tuple(sorted(one + two))]

    def added(self, one: Kinds, two: Kinds) -> int:
        return self.bound(tuple(sorted(one + two))) - self.bound(one) - self.bound(two)

    def with_fillers(self, split: Split, fillers: Kinds) -> Split:
        """Give each filler, the coarsest first, to the lane whose bound grows least."""
        lanes, kinds, bound = list(map(self.mask_of, split)), self.problem.kinds, self.bounds.of_mask
        shares = list(map(bound, lanes))
        for filler in sorted(fillers, key=lambda i: (-kinds[i].granularity, -kinds[i].numel * kinds[i].count)):
            grown = [bound(lane | 1 << filler) for lane in lanes]
            costs = [more - share for more, share in zip(grown, shares, strict=True)]
            at = costs.index(min(costs))
            lanes[at], shares[at] = lanes[at] | 1 << filler, grown[at]
        return tuple(map(self.kinds_in, lanes))

    def with_moves(self, split: Masks) -> Masks:
        """Move kinds from lane to lane while the lower bounds fall."""
        if split in self.moved:
            return self.moved[split]
        lanes, bound = list(split), self.bounds.of_mask
        shares = list(map(bound, lanes))
        for kind in self.everything:
            bit = 1 << kind
            (source,) = [i for i, lane in enumerate(lanes) if lane & bit]
            without = lanes[source] ^ bit
            if not without or (rest := bound(without)) >= shares[source]:
                continue
            cost, target = min([(bound(lane | bit) - shares[i], i) for i, lane in enumerate(lanes) if i != source])
            if cost < shares[source] - rest:
                lanes[source], shares[source] = without, rest
                lanes[target], shares[target] = lanes[target] | bit, shares[target] + cost
        end = split if tuple(lanes) == split else self.with_moves(tuple(lanes))
        self.moved[split] = end
        return end


def partitions(families: Sequence[Kinds], num_lanes: int) -> Iterator[Split]:
    """All ways to put the families into exactly `num_lanes` lanes."""
    if num_lanes > len(families) or num_lanes < 1:
        return
    if num_lanes == 1:
        yield (tuple(sorted(kind for family in families for kind in family)),)
        return
    first, rest = families[0], families[1:]
    for split in partitions(rest, num_lanes - 1):
        yield (first, *split)
    for split in partitions(rest, num_lanes):
        for i in range(num_lanes):
            yield (*split[:i], tuple(sorted(first + split[i])), *split[i + 1 :])
