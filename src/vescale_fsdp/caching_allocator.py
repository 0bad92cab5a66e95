"""What a caching allocator keeps for a sequence of allocations: torch's CUDA allocator with default settings, replayed.

Sizes are rounded up to 512 bytes. Up to 1 MiB they come from segments of 2 MiB; larger ones from segments of 20 MiB
below 10 MiB, and of their own size, rounded up to 2 MiB, above that. Each stream has segments of its own. An allocation
takes the smallest free block that is large enough, and leaves what it does not need as another if that is at least 512
bytes, or more than 1 MiB among large ones. Free neighbours are joined. Segments are never given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

__all__ = ["Allocation", "CachingAllocator", "reserved_nbytes"]

MIB = 2**20
ROUNDING_NBYTES = 512
MAX_SMALL_NBYTES = MIB
SMALL_SEGMENT_NBYTES = 2 * MIB
MIN_OWN_SEGMENT_NBYTES = 10 * MIB
SHARED_SEGMENT_NBYTES = 20 * MIB
SEGMENT_ROUNDING_NBYTES = 2 * MIB


@dataclass(frozen=True, slots=True)
class Allocation:
    """`nbytes` for `name` from the pool of `stream`, or, if 0, back again."""

    name: Hashable
    nbytes: int
    stream: Hashable = None


class CachingAllocator:
    """One stream's memory; addresses are (segment, offset)."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        """(size, segment, offset) in this order, of small and of large blocks."""
        self._sizes: list[dict[int, int]] = []
        """Of each segment: where blocks begin, and how large they are."""
        self._is_small: list[bool] = []
        """Of each segment."""

    def take(self, nbytes: int) -> tuple[int, int]:
        nbytes = _rounded(max(nbytes, 1), ROUNDING_NBYTES)
        is_small = nbytes <= MAX_SMALL_NBYTES
        free = self._free[is_small]
        place = bisect_left(free, (nbytes, -1, -1))
        size, segment, offset = free.pop(place) if place < len(free) else self._new_segment(nbytes, is_small)
        rest = size - nbytes
        if rest >= ROUNDING_NBYTES if is_small else rest > MAX_SMALL_NBYTES:
            self._sizes[segment][offset + nbytes] = rest
            insort(free, (rest, segment, offset + nbytes))
            size = nbytes
        self._sizes[segment][offset] = size
        return segment, offset

    def give_back(self, address: tuple[int, int]) -> None:
        segment, offset = address
        sizes = self._sizes[segment]
        free = self._free[self._is_small[segment]]
        size = sizes[offset]
        behind = offset + size
        if behind in sizes and self._was_free(free, (sizes[behind], segment, behind)):
            size += sizes.pop(behind)
        before = max((each for each in sizes if each < offset), default=None)
        if before is not None and self._was_free(free, (sizes[before], segment, before)):
            del sizes[offset]
            offset, size = before, size + sizes[before]
        sizes[offset] = size
        insort(free, (size, segment, offset))

    def _new_segment(self, nbytes: int, is_small: bool) -> tuple[int, int, int]:
        size = _rounded(nbytes, SEGMENT_ROUNDING_NBYTES)
        if is_small:
            size = SMALL_SEGMENT_NBYTES
        elif nbytes < MIN_OWN_SEGMENT_NBYTES:
            size = SHARED_SEGMENT_NBYTES
        self.reserved += size
        self._sizes.append({0: size})
        self._is_small.append(is_small)
        return size, len(self._sizes) - 1, 0

    @staticmethod
    def _was_free(free: list[tuple[int, int, int]], block: tuple[int, int, int]) -> bool:
        """Take the block off the list if it is there."""
        place = bisect_left(free, block)
        if place == len(free) or free[place] != block:
            return False
        free.pop(place)
        return True


def reserved_nbytes(allocations: Iterable[Allocation]) -> int:
    """All streams' segments after the sequence, which starts without any."""
    pools: dict[Hashable, CachingAllocator] = {}
    live: dict[Hashable, tuple[CachingAllocator, tuple[int, int]]] = {}
    for each in allocations:
        if each.name in live:
            pool, address = live.pop(each.name)
            pool.give_back(address)
        if each.nbytes:
            pool = pools.setdefault(each.stream, CachingAllocator())
            live[each.name] = pool, pool.take(each.nbytes)
    return sum(pool.reserved for pool in pools.values())


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
