"""The geometry of a plan's picture: rectangles and rows, counted on paper."""

from __future__ import annotations

import pytest

from ragged_dtensor.granularity import Granularity
from vescale_fsdp.picture.geometry import MAX_ROWS, Piece, Row, block_edges, gaps, pieces, rows
from vescale_fsdp.picture.style import ink_on, size_text
from vescale_fsdp.plan import GroupPlan, Span, TensorPlan
from vescale_fsdp.planner import plan_group
from vescale_fsdp.spec import ParamSpec


def plan(ranks: int, *numels: int) -> GroupPlan:
    specs = [ParamSpec(f"p{at}", (numel,)) for at, numel in enumerate(numels)]
    return plan_group(specs, ranks, unit=1, align=1)


def test_a_run_is_at_most_three_rectangles() -> None:
    assert list(pieces(Span(5, 25), 8)) == [Piece(5, 8, 0, 1), Piece(0, 8, 1, 3), Piece(0, 1, 3, 4)]
    assert list(pieces(Span(8, 24), 8)) == [Piece(0, 8, 1, 3)]
    assert list(pieces(Span(9, 11), 8)) == [Piece(1, 3, 1, 2)]
    assert list(pieces(Span(3, 3), 8)) == []


@pytest.mark.parametrize("span", [Span(begin, end) for begin in range(0, 12, 3) for end in range(begin, 25, 5)])
def test_rectangles_cover_a_run_exactly(span: Span) -> None:
    covered = [
        rank * 4 + element
        for piece in pieces(span, 4)
        for rank in range(piece.top, piece.bottom)
        for element in range(piece.left, piece.right)
    ]
    assert sorted(covered) == list(range(span.begin, span.end))


def test_gaps_are_what_no_tensor_owns() -> None:
    group = plan(3, 7)
    assert group.lanes[0].share == 3
    assert list(gaps(group, 0)) == [Span(7, 9)]


def test_block_edges_lie_between_blocks() -> None:
    group = plan_group([ParamSpec("w", (12,), granularity=Granularity(2))], 2, unit=1, align=1)
    edges = [(edge.left, edge.top, edge.bottom) for edge in block_edges(group.tensors[0], 6)]
    assert edges == [(2, 0, 2), (4, 0, 2)]


def test_block_edges_count_from_the_tensors_start() -> None:
    spec = ParamSpec("w", (16,), granularity=Granularity(3))
    # From element 1, shares of 8: rank 0 holds 0-6, rank 1 7-14, rank 2 the last; blocks start at 3, 6, 9, 12 and 15.
    edges = [(edge.left, edge.top) for edge in block_edges(TensorPlan(spec, 0, 1), 8)]
    assert edges == [(4, 0), (7, 0), (2, 1), (5, 1)]


def test_few_ranks_are_a_row_each() -> None:
    assert rows(plan(4, 100), 0) == [Row(rank, rank + 1) for rank in range(4)]


def test_ranks_that_look_alike_are_one_row() -> None:
    found = rows(plan(32, 64 * 28 - 7), 0)  # 1785 elements over 32 ranks: shares of 56, 31 full and one of 49
    assert found == [Row(0, 31), Row(31, 32)]


def test_many_ranks_that_differ_become_mixed_rows_and_none_is_left_out() -> None:
    found = rows(plan(500, *([13] * 700)), 0)
    assert len(found) <= MAX_ROWS
    assert [row.first for row in found] == [0, *(row.end for row in found[:-1])]
    assert found[-1].end == 500
    assert sum(row.mixed for row in found) == 2


def test_ink_can_be_read_on_its_ground() -> None:
    assert (ink_on("#000000"), ink_on("#F0E442")) == ("white", "#222222")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1536, "1,536 bytes"), (3 * 2**20, "3 MiB"), (2**31, "2 GiB"), (2**41, "2 TiB")],
)
def test_sizes_are_short(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text
