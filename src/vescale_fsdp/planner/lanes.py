"""Splitting a group into a few flat buffers by granularity, where one would need too common a multiple."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from .bounds import any_layout_bound, forced_bound
from .one_lane import LaneLayout, lay_out
from .problem import Problem

__all__ = ["Lane", "lay_out_lanes", "total"]

MAX_FAMILIES = 6
"""Granularities told apart: more are merged, the cheapest pair first."""

NUM_SEEDS = 10
"""Splits of families per number of lanes that the small tensors are added to, the least lower bounds first."""

NUM_TRIES = 16
"""Splits laid out per number of lanes."""

Kinds = tuple[int, ...]
"""Indices of a problem's kinds, ascending."""

Split = tuple[Kinds, ...]
"""The kinds of each lane."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One buffer: the kinds of the whole problem that it holds, as a problem of its own, and the layout found."""

    kinds: Kinds
    problem: Problem
    layout: LaneLayout


def lay_out_lanes(problem: Problem, max_lanes: int, min_saving: int) -> tuple[Lane, ...]:
    """The fewest lanes that are within 0.5 %, or within `min_saving` elements per rank, of the best split found."""
    found = candidates(problem, max_lanes, min_saving)
    best = total(found[-1])
    return next(lanes for lanes in found if not is_worth_it(total(lanes), best, min_saving))


def is_worth_it(share: int, smaller: int, min_saving: int) -> bool:
    """Whether more lanes may be opened for a smaller share."""
    return share * 1000 > smaller * 1005 and share - smaller >= min_saving


def candidates(problem: Problem, max_lanes: int, min_saving: int) -> list[tuple[Lane, ...]]:
    """The best split found for 1, 2, ... lanes; none for a number of lanes that saves nothing."""
    everything = tuple(range(len(problem.kinds)))
    found: list[tuple[Lane, ...]] = [(Lane(everything, problem, lay_out(problem)),)]
    splitter = _Splitter(problem, any_layout_bound(problem))
    for num_lanes in range(2, max_lanes + 1):
        best = total(found[-1])
        if not is_worth_it(best, splitter.least, min_saving):
            break
        split = splitter.best_split(num_lanes, best)
        if split is not None:
            lanes = (replace(lane, layout=lay_out(lane.problem)) for lane in split)
            found.append(tuple(sorted(lanes, key=lambda lane: (-lane.layout.share, lane.kinds))))
    return found


def total(lanes: Sequence[Lane]) -> int:
    """Share per rank of all lanes together."""
    return sum(lane.layout.share for lane in lanes)


@dataclass
class _Splitter:
    """Lower bounds and quick layouts of lanes, each computed once."""

    problem: Problem
    least: int
    bounds: dict[Kinds, int] = field(default_factory=dict)
    lanes: dict[Kinds, Lane] = field(default_factory=dict)

    def bound(self, kinds: Kinds) -> int:
        if kinds not in self.bounds:
            lane = replace(self.problem, kinds=tuple([self.problem.kinds[kind] for kind in kinds]), module_order=())
            self.bounds[kinds] = forced_bound(lane, any_layout_bound(lane))
        return self.bounds[kinds]

    def bound_of(self, split: Split) -> int:
        return sum(map(self.bound, split))

    def lane(self, kinds: Kinds) -> Lane:
        if kinds not in self.lanes:
            problem = self.problem.part(kinds)
            self.lanes[kinds] = Lane(kinds, problem, lay_out(problem, search_steps=0))
        return self.lanes[kinds]

    def best_split(self, num_lanes: int, below: int) -> tuple[Lane, ...] | None:
        """The least split into exactly `num_lanes`, if its share is less than `below`."""
        families = self.families()
        seeds = [*partitions(families, num_lanes), *((*split, ()) for split in partitions(families, num_lanes - 1))]
        seeds.sort(key=lambda split: (self.bound_of(split), split))
        splits = dict.fromkeys(variant for seed in seeds[:NUM_SEEDS] for variant in self.variants(seed))
        best = None
        for _ in range(NUM_TRIES):
            split = min(splits, key=lambda split: (self.estimate(split), split), default=())
            if not split or self.estimate(split) >= below:
                break
            del splits[split]
            lanes = tuple(map(self.lane, split))
            if total(lanes) < below:
                best, below = lanes, total(lanes)
        return best

    def estimate(self, split: Split) -> int:
        """Shares of the lanes that are laid out, lower bounds of the others: a bad lane is met only once."""
        return sum(self.lanes[kinds].layout.share if kinds in self.lanes else self.bound(kinds) for kinds in split)

    def variants(self, seed: Split) -> Iterator[Split]:
        """The families' lanes with the small kinds: all in the last lane, or each where it costs least; then moved."""
        fillers = tuple(i for i, kind in enumerate(self.problem.kinds) if kind.numel <= self.least)
        for split in ((*seed[:-1], tuple(sorted(seed[-1] + fillers))), self.with_fillers(seed, fillers)):
            if all(split):
                yield split
                yield self.with_moves(split)

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
        lanes, kinds = list(split), self.problem.kinds
        for filler in sorted(fillers, key=lambda i: (-kinds[i].granularity, -kinds[i].numel * kinds[i].count)):
            grown = [tuple(sorted((*lane, filler))) for lane in lanes]
            cheapest = min(range(len(lanes)), key=lambda i: (self.bound(grown[i]) - self.bound(lanes[i]), i))
            lanes[cheapest] = grown[cheapest]
        return tuple(lanes)

    def with_moves(self, split: Split) -> Split:
        """Move kinds from lane to lane while the lower bounds fall."""
        moved = list(split)
        for kind in range(len(self.problem.kinds)):
            source = next(i for i, lane in enumerate(moved) if kind in lane)
            without = tuple(i for i in moved[source] if i != kind)
            grown = [tuple(sorted({*lane, kind})) for lane in moved]
            others = (i for i in range(len(moved)) if i != source)
            cost, target = min((self.bound(grown[i]) - self.bound(moved[i]), i) for i in others)
            if without and cost < self.bound(moved[source]) - self.bound(without):
                moved[source], moved[target] = without, grown[target]
        return split if tuple(moved) == split else self.with_moves(tuple(moved))


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
