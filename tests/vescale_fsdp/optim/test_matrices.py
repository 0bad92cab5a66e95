"""A parameter's matrices are contiguous runs that cover it."""

from __future__ import annotations

import pytest

from vescale_fsdp.optim.matrices import Matrix, matrices_of, panels_of


def spans(*args: object, **options: object) -> list[tuple[int, int, int]]:
    return [(m.begin, m.rows, m.columns) for m in matrices_of(*args, **options)]  # type: ignore[arg-type]


def test_shapes_become_matrices() -> None:
    assert spans((4, 3)) == [(0, 4, 3)]
    assert spans((2, 4, 3)) == [(0, 4, 3), (12, 4, 3)]
    assert spans((8, 3, 3, 3)) == [(0, 8, 27)]
    assert spans((8, 3, 5), flatten=True) == [(0, 8, 15)]


def test_a_split_cuts_the_rows_of_every_matrix() -> None:
    assert spans((16, 5), split=(8, 4, 4)) == [(0, 8, 5), (40, 4, 5), (60, 4, 5)]
    assert spans((2, 4, 3), split=(2, 2)) == [(0, 2, 3), (6, 2, 3), (12, 2, 3), (18, 2, 3)]


def test_panels_are_runs_of_rows_of_which_the_last_may_be_lower() -> None:
    panels = panels_of(Matrix(0, 100, 10, 3), 4)
    assert [(panel.begin, panel.rows) for panel in panels] == [(100, 4), (112, 4), (124, 2)]


def test_nothing_has_no_matrices() -> None:
    assert spans((0, 4)) == spans((3, 0, 2)) == spans((4, 0), split=(2, 2)) == []


def test_wrong_shapes_and_splits_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"qkv: split \(8, 4\) does not cut its 16 rows .* add up to 16"):
        matrices_of((16, 5), split=(8, 4), fqn="qkv")
    with pytest.raises(ValueError, match=r"qkv: split \(16, 0\)"):
        matrices_of((16, 5), split=(16, 0), fqn="qkv")
    with pytest.raises(ValueError, match=r"bias: expected at least 2 dimensions, got shape \(3,\).*adamw"):
        matrices_of((3,), fqn="bias")
    with pytest.raises(ValueError, match="non-negative"):
        Matrix(0, -1, 2, 2)
