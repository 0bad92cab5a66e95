"""The owners of a parameter's panels ascend, on one line of ranks, without losing the balance."""

from __future__ import annotations

import itertools
import math

import pytest

from vescale_fsdp.optim.matrices import Matrix
from vescale_fsdp.optim.panel_owners import ascending_owners


def panels(*counts: int) -> list[Matrix]:
    return [Matrix(tensor, 8 * begin, 2, 4) for tensor, count in enumerate(counts) for begin in range(count)]


def test_on_one_axis_owners_are_sorted_along_each_parameter() -> None:
    assert ascending_owners(panels(4, 2), [2, 0, 1, 0, 1, 0], [None] * 6, sizes=(3,), costs=[1] * 6) == [
        *(0, 0, 1, 2),
        *(0, 1),
    ]


def test_a_panel_that_lies_whole_stays_and_bounds_its_neighbours() -> None:
    assert ascending_owners(panels(4), [2, 0, 1, 0], [None, 1, None, None], sizes=(3,), costs=[1] * 4) == [1, 1, 1, 1]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (4, 2), (2, 3, 2)])
def test_over_several_axes_every_parameter_has_its_owners_on_one_ascending_line(sizes: tuple[int, ...]) -> None:
    counts = (5, 1, 7, 3, 4, 4, 2, 6, 8, 1, 3, 4)
    matrices, num_ranks = panels(*counts), math.prod(sizes)
    owners = ascending_owners(matrices, [0] * len(matrices), [None] * len(matrices), sizes=sizes, costs=[1] * 48)
    coordinates = list(itertools.product(*map(range, sizes)))
    longest = sizes.index(max(sizes))
    for tensor in range(len(counts)):
        at = [coordinates[owner] for owner, matrix in zip(owners, matrices, strict=True) if matrix.tensor == tensor]
        assert at == sorted(at)
        assert len({(*c[:longest], *c[longest + 1 :]) for c in at}) == 1
    assert max(owners.count(rank) for rank in range(num_ranks)) <= math.ceil(48 / num_ranks) + 1


def test_over_several_axes_panels_that_lie_whole_on_one_line_stay_there() -> None:
    matrices = panels(3, 3)
    owners = ascending_owners(matrices, [0] * 6, [4, None, 6, None, None, None], sizes=(2, 4), costs=[1] * 6)
    assert owners[0] == 4
    assert owners[2] == 6
    assert owners[1] in (4, 5, 6)
    assert all(owner < 4 for owner in owners[3:])


def test_panels_that_lie_whole_on_different_lines_travel_to_one() -> None:
    owners = ascending_owners(panels(2), [0, 0], [0, 5], sizes=(2, 4), costs=[1, 1])
    assert len({owner // 4 for owner in owners}) == 1
