"""Transfer plans without processes: ranks simulated by lists exchange what the plan says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ragged_oracle import SHAPES, fits, held, numbered, placements_of, placements_on
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_dtensor import LayoutError, RaggedShard, StridedRaggedShard, UnsupportedTransitionError
from ragged_dtensor.ownership import pieces_along
from ragged_dtensor.redistribute import Kind, kind_of, pack, unpack
from ragged_dtensor.transition import Step, find_steps, plan_slice, plan_transfer

Coordinate = tuple[int, ...]
Placements = tuple[Placement, ...]
Locals = dict[Coordinate, torch.Tensor]


def simulate(full: torch.Tensor, source: Placements, target: Placements, mesh: Coordinate) -> Locals:
    """All ranks' local tensors after the steps from source to target."""
    coordinates = list(itertools.product(*map(range, mesh)))
    local = {c: held(full, source, mesh, c) for c in coordinates}
    for step in find_steps(tuple(full.shape), source, target, mesh):
        local = {c: _after(step, full, local, mesh, c) for c in coordinates}
    return local


def _after(step: Step, full: torch.Tensor, local: Locals, mesh: Coordinate, me: Coordinate) -> torch.Tensor:
    shape, axis = tuple(full.shape), step.axis
    along = [(*me[:axis], rank, *me[axis + 1 :]) for rank in range(mesh[axis])]
    result = pieces_along(shape, step.after, axis, mesh, me)[me[axis]]
    if kind_of(step.source) is Kind.REPLICATE:
        return pack(local[me], plan_slice(shape, step, mesh, me)).view(result.local_shape)
    if kind_of(step.target) is Kind.REPLICATE:
        buffer = torch.cat([local[peer].flatten() for peer in along])
    else:
        parts = []
        for peer in along:
            send = plan_transfer(shape, step, mesh, peer).send
            parts.append(pack(local[peer], send).split(list(send.splits))[me[axis]])
        buffer = torch.cat(parts)
    return unpack(buffer, plan_transfer(shape, step, mesh, me).receive, result)


def check_all(shape: tuple[int, ...], sides: list[Placements], mesh: Coordinate) -> int:
    full = numbered(shape)
    expected = {side: {c: held(full, side, mesh, c) for c in itertools.product(*map(range, mesh))} for side in sides}
    for source, target in itertools.product(sides, sides):
        for coordinate, local in simulate(full, source, target, mesh).items():
            wanted = expected[target][coordinate]
            assert local.shape == wanted.shape, (source, target, coordinate)
            assert torch.equal(local, wanted), (source, target, coordinate)
    return len(sides)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_on_one_axis_moves_each_element_to_its_place(shape: tuple[int, ...], num_ranks: int) -> None:
    sides: list[Placements] = [(placement,) for placement in placements_of(shape, num_ranks)]
    assert check_all(shape, sides, (num_ranks,)) > len(shape)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], Coordinate, Placements, Placements]:
    """A shape, a mesh of up to three axes, and two tuples of placements that fit them."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 12]), max_size=4)))
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))

    def side() -> Placements:
        return tuple(draw(st.sampled_from(options(shape, mesh, axis))) for axis in range(len(mesh)))

    source, target = side(), side()
    assume(fits(shape, source, mesh) and fits(shape, target, mesh))
    return shape, mesh, source, target


def options(shape: tuple[int, ...], mesh: Coordinate, axis: int) -> list[Placement]:
    plain = placements_of(shape, mesh[axis])
    ragged = [p for p in plain if isinstance(p, RaggedShard) and p.dims]
    factors = sorted({math.prod(mesh[axis + 1 :]), *mesh[axis + 1 :]})
    return [*plain, *(StridedRaggedShard(p.dims, p.local_units, f) for p in ragged[::3] for f in factors)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(meshes())
def test_random_pairs_on_up_to_three_axes_move_each_element_to_its_place(
    drawn: tuple[tuple[int, ...], Coordinate, Placements, Placements],
) -> None:
    shape, mesh, source, target = drawn
    full = numbered(shape)
    for coordinate, local in simulate(full, source, target, mesh).items():
        wanted = held(full, target, mesh, coordinate)
        assert local.shape == wanted.shape
        assert torch.equal(local, wanted)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(8,), (4, 3), (4, 2, 3), (0, 3), (3,), ()], ids=str)
def test_every_pair_on_two_axes_moves_each_element_to_its_place(shape: tuple[int, ...]) -> None:
    assert check_all(shape, list(placements_on(shape, (2, 2))), (2, 2)) > len(shape)


@pytest.mark.parametrize("shape", [(8,), (4, 3), (4, 2, 3), (2, 2, 1, 2, 3), (0, 3), (3,), ()], ids=str)
def test_a_sample_of_pairs_on_two_axes_moves_each_element_to_its_place(shape: tuple[int, ...]) -> None:
    sides = list(placements_on(shape, (2, 2)))
    assert check_all(shape, sides[:: 1 + len(sides) // 20], (2, 2)) > len(shape)


def test_a_ragged_axis_moves_alone_when_the_other_stays() -> None:
    source, target = (RaggedShard((0,), (1, 3)), Shard(1)), (RaggedShard((0,), (3, 1)), Shard(1))
    assert find_steps((8, 4), source, target, (2, 2)) == (Step(0, source, target),)


def test_a_cut_inside_tensor_parallel_pieces_moves_alone() -> None:
    source = (StridedRaggedShard((0,), (1, 3), 2), Shard(0))
    target = (StridedRaggedShard((0, 1), (5, 3), 2), Shard(0))
    assert find_steps((8, 2), source, target, (2, 2)) == (Step(0, source, target),)


def test_an_outer_cut_changes_only_after_the_cuts_inside_it_are_gathered() -> None:
    source = (StridedRaggedShard((0,), (1, 1), 2), Shard(0))
    target = (StridedRaggedShard((0,), (1, 1), 2), Replicate())
    with pytest.raises(LayoutError, match="split_factor 2"):
        find_steps((8,), source, target, (2, 2))
    steps = find_steps((8,), source, (RaggedShard((0,), (1, 1)), Replicate()), (2, 2))
    assert [(step.axis, step.target) for step in steps] == [
        (0, Replicate()),
        (1, Replicate()),
        (0, RaggedShard((0,), (1, 1))),
    ]


def test_gradients_are_scattered_before_they_are_summed_over_replicas() -> None:
    ragged = RaggedShard((0,), (1, 3))
    first, second = find_steps((8, 4), (Partial(), Partial()), (Replicate(), ragged), (2, 2))
    assert (first.axis, first.target) == (1, ragged)
    assert (second.axis, second.target) == (0, Replicate())


def test_partial_is_no_target() -> None:
    with pytest.raises(UnsupportedTransitionError, match=r"no way from \(RaggedShard.*\) to \(Partial\(sum\),\)"):
        find_steps((4,), (RaggedShard((0,), (1, 1)),), (Partial(),), (2,))


def test_nothing_moves_between_two_names_of_the_same_cut() -> None:
    for target in (Shard(0), RaggedShard((0, 1), (1, 1))):
        (step,) = find_steps((4, 3), (RaggedShard((0,), (1, 1)),), (target,), (2,))
        assert plan_transfer((4, 3), step, (2,), (0,)).moves_nothing


def test_only_elements_that_change_rank_are_sent() -> None:
    # 8 rows of 3: ranks 0 and 1 own 2 + 6 rows, then 5 + 3. Rows 2, 3 and 4 go from rank 1 to rank 0.
    (step,) = find_steps((8, 3), (RaggedShard((0,), (1, 3)),), (RaggedShard((0,), (5, 3)),), (2,))
    assert plan_transfer((8, 3), step, (2,), (0,)).send.splits == (6, 0)
    assert plan_transfer((8, 3), step, (2,), (1,)).send.splits == (9, 9)


def test_whole_rows_travel_without_packing_and_columns_are_packed() -> None:
    (step,) = find_steps((4, 4), (RaggedShard((0, 1), (3, 13)),), (RaggedShard((0,), (1, 1)),), (2,))
    plan = plan_transfer((4, 4), step, (2,), (0,))
    assert plan.send.is_memory
    assert plan.receive.is_memory
    (step,) = find_steps((4, 4), (RaggedShard((0, 1), (3, 13)),), (Shard(1),), (2,))
    assert not plan_transfer((4, 4), step, (2,), (1,)).send.is_memory
