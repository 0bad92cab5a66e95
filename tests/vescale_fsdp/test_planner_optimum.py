"""Small problems against all orders: the planner finds the optimum, says so, and its bounds are never above it."""

from __future__ import annotations

import pytest
from planner_oracle import Case, least_share, random_cases, violations

from vescale_fsdp.layout import Layout
from vescale_fsdp.planner.bounds import any_layout_bound, forced_bound
from vescale_fsdp.planner.groups import lay_out_group
from vescale_fsdp.planner.problem import Problem


def lay_out(case: Case, max_lanes: int = 1) -> Layout:
    return lay_out_group(case.tensors, case.num_ranks, case.unit, case.align, max_lanes, 0)


def assert_optimal(case: Case) -> None:
    layout = lay_out(case)
    assert list(violations(case, layout, [layout.share])) == []
    best = least_share(case)
    assert (layout.share, layout.proved) == (best, True), case
    assert layout.bound <= best


@pytest.mark.parametrize("seed", range(8))
def test_500_random_cases_are_optimal_and_proved(seed: int) -> None:
    for case in random_cases(seed, 500):
        assert_optimal(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(100, 120))
def test_2000_more_random_cases_are_optimal_and_proved(seed: int) -> None:
    for case in random_cases(seed, 2000):
        assert_optimal(case)


@pytest.mark.parametrize("seed", range(4))
def test_bounds_are_never_above_the_optimum(seed: int) -> None:
    for case in random_cases(1000 + seed, 300, max_tensors=4):
        problem = Problem.reduce(case.tensors, case.num_ranks, case.unit, case.align)
        least = any_layout_bound(problem, max_divisor=24)
        best = least_share(case)
        assert any_layout_bound(problem) <= least <= forced_bound(problem, least) <= best // case.align


@pytest.mark.parametrize("seed", range(4))
def test_random_cases_with_lanes_break_no_rule_and_are_not_larger(seed: int) -> None:
    for case in random_cases(2000 + seed, 200):
        layout = lay_out(case, max_lanes=3)
        assert list(violations(case, layout, [lane.share for lane in layout.lanes])) == []
        assert layout.bound <= layout.share <= lay_out(case).share


@pytest.mark.parametrize(
    ("numels", "granularities", "num_ranks", "share"),
    [
        ((9,), (4,), 2, 5),  # pieces 4 + 5: feasibility is not monotone, 12 elements over 3 ranks fit 4 but not 5
        ((12,), (4,), 3, 4),
        ((10,), (10,), 4, 10),  # a whole tensor lies on one rank
        ((10,), (50,), 4, 10),  # and so does one that is smaller than its block
        ((7,), (1,), 1, 7),
        ((1, 1, 1), (1, 1, 1), 8, 1),
        ((0, 0), (3, 1), 4, 0),
        ((6, 6), (3, 2), 4, 4),  # 3 would be a multiple of one granularity only; two lanes of 2 and 3 are no better
    ],
)
def test_worked_examples(numels: tuple[int, ...], granularities: tuple[int, ...], num_ranks: int, share: int) -> None:
    case = Case(numels, granularities, num_ranks)
    assert share == least_share(case)
    assert lay_out(case).share == share


def test_a_short_last_block_gives_no_exception() -> None:
    # 7 elements in blocks of 3 over 3 ranks: 2 | 3 | 2 would cut the first block; 3 | 3 | 1 does not.
    layout = lay_out(Case((7,), (3,), 3))
    assert layout.share == 3


def test_the_module_order_wins_ties() -> None:
    layout = lay_out(Case((8, 2, 6, 4), (1, 1, 1, 1), 4))
    assert layout.starts == (0, 8, 10, 16)


def test_tensors_that_alignment_or_whole_blocks_make_equal_are_one_kind() -> None:
    # Rows of 8 and of 20 that are never cut, and 37 elements: 40 after rounding up to the alignment.
    problem = Problem.reduce([(40, 40, 8), (40, 90, 20), (37, 40, 8), (40, 8, 8)], 4, 8, 8)
    assert [(kind.numel, kind.granularity, kind.count) for kind in problem.kinds] == [(5, 5, 3), (5, 1, 1)]
    assert problem.module_order == ((0, 3), (1, 1))


def test_equal_tensors_take_their_places_in_module_order() -> None:
    layout = lay_out(Case((5, 3, 5, 3, 5), (5, 3, 5, 3, 5), 3))
    assert [start for start, numel in zip(layout.starts, (5, 3, 5, 3, 5), strict=True) if numel == 5] == sorted(
        start for start, numel in zip(layout.starts, (5, 3, 5, 3, 5), strict=True) if numel == 5
    )
