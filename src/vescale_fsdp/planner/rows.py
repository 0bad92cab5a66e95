"""Moving cuts to the ends of rows where that costs nothing, so that a shard keeps its tensor's shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .beam import beam_search
from .classes import ShareClass
from .greedy import NOWHERE, end_of, runs_of, start_of_cut
from .one_lane import LaneLayout
from .orders import sorted_orders
from .problem import Kind, Problem

__all__ = ["Placed", "place"]

MAX_STEPS = 20_000
"""Placements that a search over all orders may take; larger groups try a few orders only."""

Placed = list[tuple[int, int, int]]
"""(kind, start, count) of tensors that follow each other without a gap, in the order of the buffer."""


def place(problem: Problem, layout: LaneLayout) -> Placed:
    """Starts that fit the layout's share, with as few tensors cut inside a row as a few orders find."""
    found = list(runs_of(layout.order, problem.kinds, layout.spans_ranks, layout.share))
    if all(kind.row == kind.granularity for kind in problem.kinds):
        return found
    by_rows = place_by_rows(problem, layout)
    if by_rows is not None:
        return by_rows
    dives = [
        dive for preference in preferences(problem) if (dive := soft_dive(problem, layout, preference)) is not None
    ]
    return min([found, *dives], key=lambda placed: cuts_inside_rows(problem.kinds, placed, layout.share))


def place_by_rows(problem: Problem, layout: LaneLayout) -> Placed | None:
    """The first order, the module's and the layout's own before others, that fits with every cut between rows."""
    kinds = tuple([replace(kind, granularity=kind.row) for kind in problem.kinds])
    spans_ranks = tuple([layout.share % kind.row == 0 for kind in kinds])
    if any(
        kind.smallest_single_cut_share > layout.share
        for kind, spans in zip(kinds, spans_ranks, strict=True)
        if not spans
    ):
        return None
    by_rows = replace(problem, kinds=kinds)
    limit = problem.num_ranks * layout.share
    for order in (problem.module_order, layout.order, *sorted_orders(by_rows, spans_ranks)):
        if end_of(order, kinds, spans_ranks, layout.share, limit) != NOWHERE:
            return list(runs_of(order, kinds, spans_ranks, layout.share))
    if by_rows.num_steps > MAX_STEPS:
        return None
    beam = beam_search(by_rows, ShareClass(layout.share, layout.share, spans_ranks), layout.share, max_steps=MAX_STEPS)
    return None if beam.order is None else list(runs_of(beam.order, kinds, spans_ranks, layout.share))


def preferences(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Kinds in the order in which a dive would rather place them: the module's, and the largest first."""
    indices = range(len(problem.kinds))
    yield tuple(indices)
    yield tuple(sorted(indices, key=lambda i: (-problem.kinds[i].numel, -problem.kinds[i].row)))


def soft_dive(problem: Problem, layout: LaneLayout, preference: Sequence[int]) -> Placed | None:
    """At each point the first kind that can be placed, and cut between rows, without a gap; else with the least gap
    that the buffer can spare; else it is cut inside a row. None if that does not fit."""
    kinds, share = problem.kinds, layout.share
    left = [kind.count for kind in kinds]
    waiting, position = list(preference), 0
    placed: Placed = []
    spare = problem.num_ranks * share - problem.numel
    while waiting:
        kind, start = _next(kinds, layout, waiting, position, spare)
        if kind < 0 or start - position > spare:
            return None
        spare -= start - position
        rest = share - start % share
        count = max(1, min(left[kind], rest // kinds[kind].numel))
        placed.append((kind, start, count))
        position = start + count * kinds[kind].numel
        left[kind] -= count
        if not left[kind]:
            waiting.remove(kind)
    return placed


def _next(
    kinds: Sequence[Kind], layout: LaneLayout, waiting: Sequence[int], position: int, spare: int
) -> tuple[int, int]:
    share = layout.share
    rest = share - position % share
    best, best_start = -1, position + spare + 1
    for i in waiting:
        kind = kinds[i]
        if kind.numel <= rest:
            return i, position
        start = start_of_cut(position, rest, kind.numel, kind.row, share % kind.row == 0, share)
        if start == position:
            return i, position
        if 0 <= start < best_start:
            best, best_start = i, start
    if best >= 0:
        return best, best_start
    starts = (
        (start_of_cut(position, rest, kinds[i].numel, kinds[i].granularity, layout.spans_ranks[i], share), i)
        for i in waiting
    )
    start, best = min(((start, i) for start, i in starts if start >= 0), default=(0, -1))
    return best, start


def cuts_inside_rows(kinds: Sequence[Kind], placed: Placed, share: int) -> int:
    """How many tensors are cut inside a row."""
    starts = ((kinds[kind], start + i * kinds[kind].numel) for kind, start, count in placed for i in range(count))
    return sum(_is_cut_inside_a_row(kind, start, share) for kind, start in starts)


def _is_cut_inside_a_row(kind: Kind, start: int, share: int) -> bool:
    head = share - start % share
    if head >= kind.numel:
        return False
    return head % kind.row != 0 or (head + share < kind.numel and share % kind.row != 0)
