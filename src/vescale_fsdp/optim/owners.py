"""Who computes which matrix: costs in, one owner per matrix out, the same on every rank.

    costs 5 4 3 3 3, two ranks:   rank 0: 5 4 = 9    rank 1: 3 3 3 = 9

Everything follows from global shapes and cuts, never from what this rank sees, so that no message is needed to agree.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Ownership", "best_load", "select_owners"]

# A rank that already holds most of a matrix may own it while no load exceeds this multiple of the best possible.
SLACK = 1.05
# LPT's result is taken as it is when it is this close to the bound; a search costs matrices x ranks.
CLOSE = 1.01
# So many matrices of two ranks are divided anew by trying every division.
MOST_TRIED = 16


@dataclass(frozen=True)
class Ownership:
    """`owners[i]` computes matrix i; `loads[r]` is the sum of the costs of rank r's matrices."""

    owners: tuple[int, ...]
    loads: tuple[int, ...]

    @property
    def max_load(self) -> int:
        return max(self.loads)


def select_owners(
    costs: Sequence[int],
    num_ranks: int,
    *,
    held: Sequence[Mapping[int, int]] | None = None,
    whole: Sequence[int | None] | None = None,
) -> Ownership:
    """Balance matrices over ranks: the dearest first, each to the least loaded rank (LPT); more if that is not close.

    held: for each matrix, how many of its elements each rank holds (zeros left out). The rank that holds most is
        preferred as long as the largest load stays within 1.05 of the best that whole matrices allow (or LPT's).
    whole: for each matrix, the rank that holds all of it, or None. Such a matrix stays where it is, whatever the loads.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks: expected at least 1, got {num_ranks}.")
    if min(costs, default=0) < 0:
        raise ValueError(f"Costs must not be negative, got {min(costs)}.")
    pinned = tuple(whole) if whole is not None else (None,) * len(costs)
    favourites = [_by_holding(ranks) for ranks in held] if held is not None else [()] * len(costs)
    balanced = _balance(costs, num_ranks, pinned)
    if not any(favourites):
        return balanced
    limit = max(balanced.max_load, int(SLACK * best_load(costs, num_ranks)))
    for tenths in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1):
        candidate = _assign(costs, num_ranks, pinned, favourites, limit * tenths // 10)
        if candidate.max_load <= limit:
            return candidate
    return balanced


def best_load(costs: Sequence[int], num_ranks: int) -> int:
    """A load that no assignment of whole matrices can beat: the mean, the dearest, the pigeonhole of k*m+1 matrices.

    With k*m+1 matrices at least this dear on m ranks, some rank has k+1 of them, hence at least the k+1 cheapest.
    """
    descending = sorted(costs, reverse=True)
    bound = -(-sum(descending) // num_ranks)
    for count in range(1, len(descending) // num_ranks + 2):
        last = (count - 1) * num_ranks + 1
        if last <= len(descending):
            bound = max(bound, sum(descending[last - count : last]))
    return bound


def _by_holding(ranks: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(sorted((rank for rank, numel in ranks.items() if numel), key=lambda rank: (-ranks[rank], rank)))


def _balance(costs: Sequence[int], num_ranks: int, pinned: Sequence[int | None]) -> Ownership:
    """LPT; where its largest load is not proved best, a search for a smaller one (MULTIFIT), then pair by pair."""
    best = _assign(costs, num_ranks, pinned, [()] * len(costs), 0)
    low, high = best_load(costs, num_ranks), best.max_load
    enough = int(CLOSE * low)
    for _ in range(12):
        if high <= CLOSE * low:
            break
        capacity = (low + high) // 2
        packed = _first_fit(costs, num_ranks, pinned, capacity)
        if packed is None:
            low = capacity + 1
        else:
            best, high = packed, packed.max_load
    return _even_out(costs, best, pinned, enough)


def _assign(
    costs: Sequence[int],
    num_ranks: int,
    pinned: Sequence[int | None],
    favourites: Sequence[tuple[int, ...]],
    limit: int,
) -> Ownership:
    """Dearest first: to the favourite that stays within `limit`, else to the least loaded rank."""
    owners, loads = _place_pinned(costs, num_ranks, pinned)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for index in _dearest_first(costs, pinned):
        fitting = (rank for rank in favourites[index] if loads[rank] + costs[index] <= limit)
        rank = next(fitting, None)
        if rank is None:
            while heap[0][0] != loads[heap[0][1]]:
                heapq.heappop(heap)  # an entry from before the rank took more
            rank = heap[0][1]
        owners[index] = rank
        loads[rank] += costs[index]
        heapq.heappush(heap, (loads[rank], rank))
    return Ownership(tuple(owners), tuple(loads))


def _first_fit(costs: Sequence[int], num_ranks: int, pinned: Sequence[int | None], capacity: int) -> Ownership | None:
    """Dearest first into the first rank with room, or None when some matrix finds none."""
    owners, loads = _place_pinned(costs, num_ranks, pinned)
    if max(loads) > capacity:
        return None
    for index in _dearest_first(costs, pinned):
        rank = next((rank for rank in range(num_ranks) if loads[rank] + costs[index] <= capacity), None)
        if rank is None:
            return None
        owners[index] = rank
        loads[rank] += costs[index]
    return Ownership(tuple(owners), tuple(loads))


def _even_out(costs: Sequence[int], best: Ownership, pinned: Sequence[int | None], enough: int) -> Ownership:
    """Divide the matrices of the busiest rank and of another anew between the two, as long as that helps."""
    by_rank: list[list[int]] = [[] for _ in best.loads]
    for index, rank in enumerate(best.owners):
        by_rank[rank].append(index)
    loads = list(best.loads)
    while max(loads) > enough:
        busiest = loads.index(max(loads))
        for other in sorted(range(len(loads)), key=lambda rank: (loads[rank], rank)):
            halves = _halves(costs, by_rank[busiest], by_rank[other], pinned)
            sums = [sum(costs[index] for index in half) for half in halves]
            if max(sums) < loads[busiest]:
                by_rank[busiest], by_rank[other] = halves
                loads[busiest], loads[other] = sums
                break
        else:
            break
    owners = {index: rank for rank, indices in enumerate(by_rank) for index in indices}
    return Ownership(tuple(owners[index] for index in range(len(costs))), tuple(loads))


def _halves(
    costs: Sequence[int], one: Sequence[int], other: Sequence[int], pinned: Sequence[int | None]
) -> tuple[list[int], list[int]]:
    """The evenest division of two ranks' matrices, the pinned ones where they are; of a few, since all are tried."""
    free = [index for index in (*one, *other) if pinned[index] is None]
    if len(free) > MOST_TRIED or one is other:
        return list(one), list(other)
    kept = [[index for index in half if pinned[index] is not None] for half in (one, other)]
    subsets: dict[int, tuple[int, ...]] = {sum(costs[index] for index in kept[0]): ()}
    for index in free:
        for load, chosen in list(subsets.items()):
            subsets.setdefault(load + costs[index], (*chosen, index))
    total = sum(costs[index] for index in (*one, *other))
    chosen = subsets[min(subsets, key=lambda load: (max(load, total - load), load))]
    return [*kept[0], *chosen], [*kept[1], *(index for index in free if index not in chosen)]


def _place_pinned(costs: Sequence[int], num_ranks: int, pinned: Sequence[int | None]) -> tuple[list[int], list[int]]:
    owners = [-1] * len(costs)
    loads = [0] * num_ranks
    for index, rank in enumerate(pinned):
        if rank is not None:
            owners[index] = rank
            loads[rank] += costs[index]
    return owners, loads


def _dearest_first(costs: Sequence[int], pinned: Sequence[int | None]) -> list[int]:
    free = [index for index in range(len(costs)) if pinned[index] is None]
    return sorted(free, key=lambda index: (-costs[index], index))
