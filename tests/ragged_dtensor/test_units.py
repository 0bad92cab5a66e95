"""Units: one spelling per meaning, and a cost that does not grow with the ranks."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_dtensor import LayoutError, Units

unit_lists = st.lists(st.integers(0, 6), min_size=1, max_size=12).filter(any)


def test_units_are_reduced_by_their_gcd() -> None:
    assert Units((2, 4, 4, 0)) == (1, 2, 2, 0)
    assert Units((2, 4, 4, 0)).runs == ((1, 1), (2, 2), (0, 1))
    assert Units((0, 7)) == Units((0, 1))


def test_a_plan_over_16384_ranks_is_five_runs() -> None:
    units = Units.from_runs(((0, 3), (5, 1), (8, 16_000), (2, 1), (0, 379)))
    assert (len(units), len(units.runs), units.total) == (16_384, 5, 5 + 8 * 16_000 + 2)
    assert units.before(4) == 5
    assert units.before(16_384) == units.total


@given(unit_lists)
def test_units_behave_like_the_reduced_tuple(values: list[int]) -> None:
    units = Units(values)
    reduced = tuple(units)
    assert units == reduced
    assert hash(units) == hash(reduced)
    assert [units[rank] for rank in range(-len(units), len(units))] == [*reduced, *reduced]
    assert [units.before(rank) for rank in range(len(units) + 1)] == [
        sum(reduced[:rank]) for rank in range(len(units) + 1)
    ]
    assert [r for r in units.owners] == [rank for rank, value in enumerate(values) if value]
    assert units.max == max(reduced)
    assert values[0] * reduced[-1] == values[-1] * reduced[0]


@given(unit_lists)
def test_units_survive_pickle_runs_and_repr(values: list[int]) -> None:
    units = Units(values)
    assert pickle.loads(pickle.dumps(units)) == units
    assert Units.from_runs(units.runs) == units
    assert eval(repr(units)) == units


def test_a_long_repr_names_runs_and_evaluates_back() -> None:
    units = Units.from_runs(((1, 5000), (0, 3)))
    assert repr(units) == "Units.from_runs(((1, 5000), (0, 3)))"
    assert eval(repr(units)) == units


@pytest.mark.parametrize("values", [(), (0, 0), (1, -1), (1.0, 2), (True, 1), "12", 3], ids=repr)
def test_what_is_no_share_is_refused(values: object) -> None:
    with pytest.raises(LayoutError, match="local_units"):
        Units(values)  # type: ignore[arg-type]


def test_an_index_beyond_the_ranks_is_refused() -> None:
    with pytest.raises(IndexError, match="rank 2 of 2"):
        Units((1, 2))[2]
