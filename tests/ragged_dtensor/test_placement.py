"""RaggedShard as a value: checked, canonical, hashable, picklable, copied, printed."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_dtensor import LayoutError, RaggedShard, StridedRaggedShard, Units

PLACEMENTS = [
    RaggedShard((0,), (1, 3)),
    RaggedShard((0, 1), (1, 2, 0, 5)),
    RaggedShard((), (0, 1)),
    StridedRaggedShard((0,), (1, 3), 2),
    RaggedShard((0,), Units.from_runs(((0, 5), (3, 1), (4, 9000)))),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_placement_survives_every_kind_of_copy(placement: RaggedShard) -> None:
    buffer = io.BytesIO()
    torch.save(placement, buffer)
    buffer.seek(0)
    copies = [
        pickle.loads(pickle.dumps(placement)),
        copy.copy(placement),
        copy.deepcopy(placement),
        torch.load(buffer, weights_only=True),
        eval(repr(placement)),
    ]
    for other in copies:
        assert type(other) is type(placement)
        assert other == placement
        assert {placement: "found"}[other] == "found"


def test_equal_cuts_have_one_spelling() -> None:
    assert RaggedShard((0,), (2, 6)) == RaggedShard([0], [1, 3]) == RaggedShard(range(1), Units((1, 3)))
    assert len({RaggedShard((0,), (2, 6)), RaggedShard((0,), (1, 3)), RaggedShard((0, 1), (1, 3))}) == 2


def test_other_placements_are_never_equal() -> None:
    ragged: list[Placement] = [RaggedShard((0,), (1, 1)), StridedRaggedShard((0,), (1, 1), 2)]
    for placement in ragged:
        assert placement not in (Shard(0), Replicate())
        assert Shard(0) != placement
    assert ragged[0] != ragged[1]
    assert StridedRaggedShard((0,), (1, 1), 2) != StridedRaggedShard((0,), (1, 1), 4)


def test_torch_sees_neither_a_shard_nor_a_replica_nor_a_partial_value() -> None:
    for placement in PLACEMENTS:
        assert not placement.is_shard()
        assert not placement.is_shard(0)
        assert not placement.is_replicate()
        assert not placement.is_partial()


@pytest.mark.parametrize(
    ("dims", "units", "message"),
    [
        ((1,), (1, 1), r"leading run .* got \(1,\)"),
        ((-1,), (1, 1), "Negative dims are not accepted"),
        ((0, 2), (1, 1), r"got \(0, 2\)"),
        (0, (1, 1), r"Write \(0,\)"),
        ((0,), (0, 0), "at least one rank with a positive share"),
        ((0,), (1, -1), "non-negative integers, got -1"),
        ((0,), (1.5, 1), r"must be integers, got 1\.5"),
        ((), (1, 1), r"dims=\(\) is for 0-dim tensors"),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_write(dims: object, units: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        RaggedShard(dims, units)  # type: ignore[arg-type]


def test_a_strided_cut_needs_pieces_to_cut() -> None:
    with pytest.raises(LayoutError, match="positive integer, got 0"):
        StridedRaggedShard((0,), (1, 1), 0)
    with pytest.raises(LayoutError, match="needs dims that start at 0"):
        StridedRaggedShard((), (0, 1), 2)


def test_a_placement_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        RaggedShard((0,), (1, 1)).dims = (0, 1)  # type: ignore[misc]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any), st.integers(1, 4))
def test_printing_evaluates_back(units: list[int], num_dims: int) -> None:
    placement = RaggedShard(range(num_dims), units)
    assert eval(repr(placement)) == placement
    assert eval(str(placement)) == placement


def test_comparing_placements_over_16384_ranks_looks_at_runs_alone() -> None:
    class Counting(Units):
        def __iter__(self):  # type: ignore[no-untyped-def]
            raise AssertionError("walked the ranks")

    one, other = (RaggedShard((0,), Units.from_runs(((1, 2), (3, 16_382)))) for _ in range(2))
    hash(one)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Units, "__iter__", Counting.__iter__)
        assert one == other
        assert hash(one) == hash(other)
