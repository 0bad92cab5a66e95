"""Lanes: opened where they save enough, or where they are asked for; each is a buffer by the same rules."""

from __future__ import annotations

import pytest

from ragged_dtensor.granularity import Granularity
from vescale_fsdp.plan import GroupPlan, Plan
from vescale_fsdp.planner import plan_group
from vescale_fsdp.spec import ParamSpec


def two_families(scale: int, max_lanes: int | None) -> GroupPlan:
    """Over 64 ranks, 7-element and 5-element blocks in one buffer ask for a share that 35 divides."""
    specs = [
        ParamSpec("sevens", (64 * 7 * 3, scale), granularity=Granularity(7 * scale)),
        ParamSpec("fives", (64 * 5 * 3, scale), granularity=Granularity(5 * scale)),
    ]
    return plan_group(specs, 64, unit=1, align=1, max_lanes=max_lanes)


def test_two_families_of_blocks_need_a_common_multiple_in_one_lane_and_none_in_two() -> None:
    one, two = two_families(1, 1), two_families(1, 2)
    assert (len(one.lanes), one.share, one.proved) == (1, 70, True)  # 36 needed, but 7 and 5 divide the share
    assert ([lane.share for lane in two.lanes], two.padding, two.proved) == ([21, 15], 0, True)
    assert "proved optimal in one lane" in Plan((one,)).explain()
    assert Plan((two,)).explain().endswith("lane 1: 1 parameter, 15 elements per rank")


def test_nobody_opens_a_second_lane_for_less_than_a_mebibyte_of_the_gathered_group() -> None:
    saved_nbytes = 64 * 34 * 4  # on each of 64 ranks 34 elements of 4 bytes
    assert len(two_families(1, None).lanes) == 1
    assert len(two_families((1 << 20) // saved_nbytes, None).lanes) == 1
    assert len(two_families((1 << 20) // saved_nbytes + 1, None).lanes) == 2


def test_nobody_opens_a_second_lane_for_less_than_half_a_percent() -> None:
    # 150 blocks of 8 and one small tensor of a coarser family: the common multiple costs 1/300 of the share at most.
    specs = [
        ParamSpec("eights", (8 * 300,), granularity=Granularity(8)),
        ParamSpec("threes", (3 * 2,), granularity=Granularity(3)),
    ]
    one, three = (plan_group(specs, 2, unit=1, align=1, max_lanes=lanes) for lanes in (1, 3))
    assert one.share <= 1.005 * three.bound
    assert three == one


@pytest.mark.parametrize("max_lanes", [1, 2, 3])
def test_the_cap_is_kept(max_lanes: int) -> None:
    blocks = (7, 11, 13, 17)
    specs = [ParamSpec(f"p{b}", (b * 64,), granularity=Granularity(b)) for b in blocks]
    assert len(plan_group(specs, 32, unit=1, align=1, max_lanes=max_lanes).lanes) <= max_lanes


def test_the_largest_lane_comes_first() -> None:
    shares = [lane.share for lane in two_families(1, 3).lanes]
    assert shares == sorted(shares, reverse=True)


def test_small_tensors_may_have_a_lane_of_their_own() -> None:
    # Both large tensors fill a common multiple exactly; whatever is added to their buffer would cost a whole block.
    specs = [
        ParamSpec("w", (24 * 96,), granularity=Granularity(12)),
        ParamSpec("v", (24 * 96,), granularity=Granularity(24)),
        *(ParamSpec(f"norm{i}", (6,)) for i in range(4)),
    ]
    group = plan_group(specs, 24, unit=1, align=1, max_lanes=2)
    assert ([lane.share for lane in group.lanes], group.padding) == ([192, 1], 0)


def test_tensors_smaller_than_a_share_may_have_a_lane_of_their_own() -> None:
    # 8 tensors of 10 blocks of 16 fill 80 of each of 16 shares; the others, 6151 elements, need 385.
    # One buffer takes 469.
    sizes = [(297, 3, 1), (96, 1, 2), (160, 16, 8), (56, 7, 2), (95, 5, 30), (1350, 7, 2)]
    specs = [
        ParamSpec(f"p{kind}.{i}", (numel,), granularity=Granularity(run))
        for kind, (numel, run, count) in enumerate(sizes)
        for i in range(count)
    ]
    one, two = (plan_group(specs, 16, unit=1, align=1, max_lanes=lanes) for lanes in (1, 2))
    assert (one.share, [lane.share for lane in two.lanes]) == (469, [385, 80])
