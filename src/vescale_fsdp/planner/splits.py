"""Ways to split a group over a few buffers, by lower bounds alone: nothing is laid out here."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence

from .bounds import Bounds

__all__ = ["Split", "Splits"]

MAX_FAMILIES = 6
"""Granularities told apart: more are merged, the cheapest pair first."""

NUM_SEEDS = 10
"""Splits of families per number of lanes that the small tensors are added to, the least lower bounds first."""

TINY = 1000
"""Kinds of one granularity that hold less than one in so many of the elements stay together."""

Split = tuple[int, ...]
"""The kinds of each lane, a bit per kind."""


class Splits:
    """Families are kinds larger than an average share, by granularity; fillers are the smaller kinds, which go where
    they cost least. Tiny fillers of one granularity, such as norms and biases, are one filler."""

    def __init__(self, bounds: Bounds, least: int) -> None:
        families: dict[int, int] = {}
        fillers: dict[tuple[int, int], int] = {}
        self.tiny = 0
        for i, kind in enumerate(bounds.problem.kinds):
            numel = kind.numel * kind.count
            if kind.numel > least:
                families[kind.granularity] = families.get(kind.granularity, 0) | 1 << i
            else:
                is_tiny = numel * TINY <= bounds.problem.numel
                key = (-kind.granularity, 0 if is_tiny else -numel)
                fillers[key] = fillers.get(key, 0) | 1 << i
                self.tiny |= is_tiny << i
        self.bound = bounds.of_mask
        self.kinds = [1 << i for i in range(len(bounds.counts))]
        self.families = [mask for _, mask in sorted(families.items())]
        self.fillers = [mask for _, mask in sorted(fillers.items())]
        large = sum(self.families)
        self.units = [*(kind for kind in self.kinds if kind & large), *self.fillers]
        while len(self.families) > MAX_FAMILIES:
            self.families = self.merge_cheapest(self.families)
        self.ends_of_kinds: dict[Split, Split] = {}
        self.ends_of_units: dict[Split, Split] = {}

    def of(self, num_lanes: int) -> list[Split]:
        """Splits into so many lanes, each once."""
        seeds = self.seeds(num_lanes)
        splits = [split for seed in seeds for split in self.variants(seed)]
        if len(self.units) < len(self.kinds):
            firsts = filter(all, [self.with_fillers_last(seed) for seed in seeds])
            splits += [self.moved(split, self.units, self.ends_of_units) for split in firsts]
        return list(dict.fromkeys(splits))

    def seeds(self, num_lanes: int) -> list[Split]:
        """Ways to put the families into lanes, one of which may wait for fillers only."""
        families, bound = self.families, self.bound
        seeds = [*partitions(families, num_lanes), *((*split, 0) for split in partitions(families, num_lanes - 1))]
        return sorted(seeds, key=lambda seed: (sum(map(bound, seed)), seed))[:NUM_SEEDS]

    def variants(self, seed: Split) -> Iterator[Split]:
        """The families' lanes with the fillers: all in the last lane, or each where it costs least; then moved."""
        for split in (self.with_fillers_last(seed), self.with_fillers(seed)):
            if all(split):
                yield split
                yield self.moved(split, self.kinds, self.ends_of_kinds)

    def with_fillers_last(self, split: Split) -> Split:
        return (*split[:-1], sum(self.fillers, split[-1]))

    def merge_cheapest(self, families: Sequence[int]) -> list[int]:
        """Two families as one: the pair whose common buffer adds least to what each needs alone."""
        pairs = [(one, two) for i, one in enumerate(families) for two in families[i + 1 :]]
        one, two = min(pairs, key=lambda pair: (self.added(*pair), pair))
        return [*(family for family in families if family not in (one, two)), one | two]

    def added(self, one: int, two: int) -> int:
        return self.bound(one | two) - self.bound(one) - self.bound(two)

    def with_fillers(self, split: Split) -> Split:
        """Give each filler, the coarsest first, to the lane whose bound grows least."""
        lanes, bound = list(split), self.bound
        shares = list(map(bound, lanes))
        for filler in self.fillers:
            grown = [bound(lane | filler) for lane in lanes]
            costs = list(map(operator.sub, grown, shares))
            at = costs.index(min(costs))
            lanes[at], shares[at] = lanes[at] | filler, grown[at]
        return tuple(lanes)

    def moved(self, split: Split, units: Sequence[int], ends: dict[Split, Split]) -> Split:
        """The lanes after units moved from one to another while the lower bounds fall. Known ends are kept."""
        lanes, bound, tiny, way = list(split), self.bound, self.tiny, [split]
        at = [[bool(lane & unit) for lane in lanes].index(True) for unit in units]
        shares = list(map(bound, lanes))
        while split not in ends:
            for i, unit in enumerate(units):
                source = at[i]
                if unit & tiny and bound(lanes[source] & ~tiny) == shares[source]:
                    continue  # without any of its tiny kinds, the lane needs as much
                without = lanes[source] ^ unit
                if not without or (gain := shares[source] - bound(without)) <= 0:
                    continue
                cost, target = min([(bound(lane | unit) - shares[j], j) for j, lane in enumerate(lanes) if j != source])
                if cost < gain:
                    lanes[source], shares[source] = without, shares[source] - gain
                    lanes[target], shares[target] = lanes[target] | unit, shares[target] + cost
                    at[i] = target
            if tuple(lanes) == split:
                ends[split] = split
            split = tuple(lanes)
            way.append(split)
        ends.update(dict.fromkeys(way, ends[split]))
        return ends[split]


def partitions(families: Sequence[int], num_lanes: int) -> Iterator[Split]:
    """All ways to put the families into exactly `num_lanes` lanes."""
    if num_lanes > len(families) or num_lanes < 1:
        return
    if num_lanes == 1:
        yield (functools.reduce(operator.or_, families),)
        return
    first, rest = families[0], families[1:]
    for split in partitions(rest, num_lanes - 1):
        yield (first, *split)
    for split in partitions(rest, num_lanes):
        for i in range(num_lanes):
            yield (*split[:i], first | split[i], *split[i + 1 :])
