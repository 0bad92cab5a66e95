"""Cuts fall between rows where that costs nothing, and a group never grows for their sake."""

from __future__ import annotations

import pytest
from planner_oracle import Case, least_share, random_cases, violations

from vescale_fsdp.layout import Layout
from vescale_fsdp.plan import GroupPlan
from vescale_fsdp.planner import plan_group
from vescale_fsdp.planner.groups import lay_out_group
from vescale_fsdp.spec import ParamSpec


def cuts_inside_rows(group: GroupPlan) -> list[str]:
    ends = [(t.spec, group.shard_range(t.spec.fqn, rank)) for t in group.tensors for rank in range(group.num_ranks)]
    return [spec.fqn for spec, span in ends if span.end < spec.numel and span.end % spec.row]


def with_rows(case: Case, row: int) -> Layout:
    tensors = tuple((numel, run, row) for numel, run in zip(case.numels, case.granularities, strict=True))
    return lay_out_group(tensors, case.num_ranks, case.unit, case.align, 1, 0)


def test_square_matrices_are_cut_between_rows_although_no_one_asked() -> None:
    specs = [ParamSpec(f"w{i}", (64, 48)) for i in range(3)]
    group = plan_group(specs, 4)
    assert (group.padding, cuts_inside_rows(group)) == (0, [])


def test_the_order_changes_where_that_keeps_rows_whole() -> None:
    # In module order the boundary at 30 would cut row 3 of the matrix; the vectors around it can fill up the rank.
    specs = [ParamSpec("a", (6,)), ParamSpec("w", (6, 8)), ParamSpec("b", (6,))]
    group = plan_group(specs, 2, unit=1, align=1)
    assert (group.share, cuts_inside_rows(group)) == (30, [])


def test_a_search_over_all_orders_keeps_rows_whole_where_sorted_ones_do_not() -> None:
    # Only a, w, b and b, w, a end a row of w at the boundary behind 5 elements.
    group = plan_group([ParamSpec("a", (1,)), ParamSpec("b", (1,)), ParamSpec("w", (2, 4))], 2, unit=1, align=1)
    assert (group.share, cuts_inside_rows(group)) == (5, [])


def test_fewer_tensors_are_cut_inside_a_row_where_not_all_rows_can_stay_whole() -> None:
    # 36 elements without a gap, 9 per rank, rows of 4: each boundary cuts a row, but all three can fall into w.
    specs = [ParamSpec("w", (5, 4)), ParamSpec("u", (2, 4)), ParamSpec("v", (2, 4))]
    group = plan_group(specs, 4, unit=1, align=1)
    assert (group.share, len(set(cuts_inside_rows(group)))) == (9, 1)


def test_a_row_is_cut_rather_than_a_byte_spent() -> None:
    group = plan_group([ParamSpec("w", (3, 8))], 2, unit=1, align=1)
    assert (group.share, cuts_inside_rows(group)) == (12, ["w"])


@pytest.mark.parametrize("seed", range(3))
def test_no_group_grows_and_no_rule_breaks_for_the_sake_of_rows(seed: int) -> None:
    for case in random_cases(3000 + seed, 200):
        plain, rows = with_rows(case, 1), with_rows(case, 4)
        assert (rows.share, list(violations(case, rows, [rows.share]))) == (plain.share, [])


@pytest.mark.parametrize("seed", range(3))
def test_rows_stay_whole_wherever_all_orders_allow_it_at_the_same_share(seed: int) -> None:
    found = 0
    for case in random_cases(4000 + seed, 300, max_tensors=4):
        if any(run not in (1, 2) for run in case.granularities) or not any(case.numels):
            continue
        by_rows = Case(case.numels, tuple(4 for _ in case.numels), case.num_ranks, case.unit, case.align)
        layout = with_rows(case, 4)
        if least_share(by_rows) == layout.share:
            assert list(violations(by_rows, layout, [layout.share])) == []
            found += 1
    assert found > 5
