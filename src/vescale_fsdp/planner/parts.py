"""Equal tensors in several lanes: copies of one kind move to where they fill a share that is needed anyway."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .bounds import Bounds

__all__ = ["Counts", "part_copies"]

HEAVY = 20
"""A kind with at least one in so many of the elements is worth parting."""

NUM_STEPS = 3
"""Shares tried per lane that copies move to, the least first."""

MAX_MOVES = 4

Counts = tuple[int, ...]
"""Of each kind, how many tensors a lane holds."""


def part_copies(bounds: Bounds, lanes: Sequence[Counts], below: int) -> tuple[Counts, ...] | None:
    """The lanes with copies of heavy kinds moved while the sum of the lower bounds falls; None if not `below` this."""
    heavy = _heavy_kinds(bounds)
    parted, needed = tuple(lanes), below
    for _ in range(MAX_MOVES):
        best = min(_moves(bounds, parted, heavy, needed), default=None)
        if best is None:
            break
        needed, parted = best
    return parted if needed < below and all(map(any, parted)) else None


def _heavy_kinds(bounds: Bounds) -> list[int]:
    enough = bounds.problem.numel // HEAVY
    return [i for i, count in enumerate(bounds.counts) if count > 1 and bounds.numels[i] * count >= enough]


def _moves(
    bounds: Bounds, lanes: tuple[Counts, ...], heavy: Sequence[int], below: int
) -> Iterator[tuple[int, tuple[Counts, ...]]]:
    """(sum of lower bounds, lanes) of each way to fill one lane with copies from another that falls below a sum."""
    shares = [bounds.of_counts(lane) for lane in lanes]
    for source, giving in enumerate(lanes):
        for target, taking in enumerate(lanes):
            if source == target:
                continue
            most = below - sum(shares) + shares[source] + shares[target]
            for kind in heavy:
                for share, given, taken in _fillings(bounds, giving, taking, kind, most):
                    if (needed := share + bounds.of_counts(given)) < most:
                        moved = list(lanes)
                        moved[source], moved[target] = given, taken
                        yield below - most + needed, tuple(moved)


def _fillings(
    bounds: Bounds, giving: Counts, taking: Counts, kind: int, below: int
) -> Iterator[tuple[int, Counts, Counts]]:
    """(share of the lane that takes, both lanes) after as many copies moved as fit into its next shares."""
    num_ranks, numel, number = bounds.problem.num_ranks, bounds.numels[kind], 0
    held, left = bounds.held(taking), bounds.held(giving)
    for _ in range(NUM_STEPS):
        if number >= giving[kind]:
            return
        share = bounds.of_counts(_with(taking, kind, number + 1))
        if share >= below:
            return
        number = min(max(number + 1, (num_ranks * share - held) // numel), giving[kind])
        if share - (number * numel - left) // num_ranks >= below:
            return
        if left > number * numel:
            taken = _with(taking, kind, number)
            share = bounds.of_counts(taken)
            if share - (number * numel - left) // num_ranks < below:
                yield share, _with(giving, kind, -number), taken


def _with(lane: Counts, kind: int, number: int) -> Counts:
    return (*lane[:kind], lane[kind] + number, *lane[kind + 1 :])
