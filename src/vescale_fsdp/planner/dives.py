"""Orders made for one share: at each point the first kind, by preference, that leaves no gap, else the least gap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .classes import ShareClass
from .greedy import start_behind
from .problem import Order, Problem

__all__ = ["dive", "preferences"]


def preferences(problem: Problem, share_class: ShareClass) -> Iterator[tuple[int, ...]]:
    """Which kinds a dive would rather place early: what is hard to place."""
    kinds = problem.kinds
    indices = range(len(kinds))
    coarse_first = sorted(indices, key=lambda i: (-kinds[i].granularity, -kinds[i].numel))
    large_first = sorted(indices, key=lambda i: (-kinds[i].numel, -kinds[i].granularity))
    yield tuple(coarse_first)
    yield tuple(large_first)
    yield tuple(sorted(coarse_first, key=lambda i: share_class.spans_ranks[i]))
    yield tuple(sorted(large_first, key=lambda i: share_class.spans_ranks[i]))


def dive(problem: Problem, share_class: ShareClass, preference: Sequence[int], share: int) -> Order | None:
    """An order that was made for this share, or None where a kind finds no place. It may end beyond the buffer."""
    kinds, spans_ranks = problem.kinds, share_class.spans_ranks
    behind = [start_behind(kind.numel, kind.granularity, share) for kind in kinds]
    left = [kind.count for kind in kinds]
    waiting = list(preference)
    runs: list[tuple[int, int]] = []
    position = 0
    while waiting:
        rest = share - position % share
        best, best_start, count = -1, -1, 1
        for i in waiting:
            kind = kinds[i]
            if kind.numel <= rest:
                best, best_start, count = i, position, min(left[i], rest // kind.numel)
                break
            head = rest - rest % kind.granularity
            if spans_ranks[i] or (head and kind.numel - head <= share):
                start = position + rest - head
            elif behind[i] < 0:
                return None
            else:
                start = position + rest + behind[i]
            if best < 0 or start < best_start:
                best, best_start = i, start
                if start == position:
                    break
        runs.append((best, count))
        position = best_start + count * kinds[best].numel
        left[best] -= count
        if not left[best]:
            waiting.remove(best)
    return tuple(runs)
