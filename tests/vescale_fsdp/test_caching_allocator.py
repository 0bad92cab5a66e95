"""The replayed allocator keeps to its documented rules: against worked numbers, and against a plainer replay."""

from __future__ import annotations

import random

import pytest
from caching_allocator import reserved_after

from vescale_fsdp.caching_allocator import Allocation, reserved_nbytes

MIB = 2**20


def reserved(*sizes: int) -> int:
    """Of allocations that all stay."""
    return reserved_nbytes(Allocation(i, size) for i, size in enumerate(sizes))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1,), 2 * MIB),
        ((MIB, MIB), 2 * MIB),
        ((MIB, MIB, 1), 4 * MIB),
        ((MIB + 1,), 20 * MIB),
        ((9 * MIB, 9 * MIB), 20 * MIB),
        ((10 * MIB,), 10 * MIB),
        ((31 * MIB,), 32 * MIB),
        ((31 * MIB, MIB), 34 * MIB),  # what is left of large segments is not for small allocations
    ],
)
def test_segments_have_the_sizes_of_the_rules(sizes: tuple[int, ...], expected: int) -> None:
    assert reserved(*sizes) == expected


def test_a_block_is_split_and_joined_again() -> None:
    a, b = Allocation("a", 12 * MIB), Allocation("b", 28 * MIB)
    assert reserved_nbytes([Allocation("all", 40 * MIB), Allocation("all", 0), a, b]) == 40 * MIB
    freed = [Allocation("a", 0), Allocation("b", 0), Allocation("all", 40 * MIB)]
    assert reserved_nbytes([Allocation("all", 40 * MIB), Allocation("all", 0), a, b, *freed]) == 40 * MIB


def test_streams_share_nothing() -> None:
    one = [Allocation("a", 40 * MIB, "one"), Allocation("a", 0)]
    assert reserved_nbytes([*one, Allocation("b", 40 * MIB, "two")]) == 80 * MIB
    assert reserved_nbytes([*one, Allocation("b", 40 * MIB, "one")]) == 40 * MIB


@pytest.mark.parametrize("seed", range(20))
def test_random_traces_reserve_what_a_plainer_replay_reserves(seed: int) -> None:
    draw = random.Random(seed)
    trace = [(draw.randrange(12), draw.choice((0, draw.randrange(2**21), draw.randrange(2**26)))) for _ in range(400)]
    assert reserved_nbytes(Allocation(*each) for each in trace) == reserved_after(trace)
