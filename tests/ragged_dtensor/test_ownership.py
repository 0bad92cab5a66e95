"""Which elements a rank owns, on meshes of any shape, against slicing the full tensor."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_oracle import SHAPES, held, numbered, placements_of, placements_on
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ragged_dtensor import LayoutError, RaggedShard, StridedRaggedShard
from ragged_dtensor.ownership import piece_of


def by_boxes(
    full: torch.Tensor, placements: tuple[Placement, ...], mesh: tuple[int, ...], at: tuple[int, ...]
) -> torch.Tensor:
    piece = piece_of(tuple(full.shape), placements, mesh, at)
    boxes = [full[tuple(slice(o, o + s) for o, s in zip(b.offsets, b.sizes, strict=True))] for b in piece.boxes()]
    return torch.cat([full.new_empty(0), *(box.flatten() for box in boxes)]).view(piece.local_shape)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_of_a_piece_hold_what_slicing_gives(shape: tuple[int, ...], num_ranks: int) -> None:
    full = numbered(shape)
    for placement, rank in itertools.product(placements_of(shape, num_ranks), range(num_ranks)):
        expected = held(full, (placement,), (num_ranks,), (rank,))
        assert torch.equal(by_boxes(full, (placement,), (num_ranks,), (rank,)), expected), placement


@pytest.mark.parametrize("shape", [(8,), (4, 3), (4, 2, 3), (0, 3), (5, 4), ()], ids=str)
def test_two_axes_hold_what_slicing_gives(shape: tuple[int, ...]) -> None:
    full = numbered(shape)
    for placements, at in itertools.product(placements_on(shape, (2, 2)), itertools.product(range(2), range(2))):
        assert torch.equal(by_boxes(full, placements, (2, 2), at), held(full, placements, (2, 2), at)), placements


def test_a_strided_cut_orders_rows_as_its_docstring_says() -> None:
    placements = (StridedRaggedShard((0,), (1, 3), 2), Shard(0))
    rows = [by_boxes(torch.arange(8), placements, (2, 2), at).tolist() for at in itertools.product(range(2), range(2))]
    assert rows == [[0], [4], [1, 2, 3], [5, 6, 7]]


@given(st.data())
def test_pieces_over_three_axes_cover_the_tensor_once(data: st.DataObject) -> None:
    mesh = (2, data.draw(st.integers(1, 3)), 2)
    inner = data.draw(st.sampled_from([Shard(0), Shard(1), Shard(2), Replicate()]))
    units = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=2).filter(any))
    dims = data.draw(st.sampled_from([(0,), (0, 1)]))
    factor = mesh[2] if inner == Shard(0) else 1
    placements = (Replicate(), RaggedShard((0,), (1,) * mesh[1]), inner)
    if data.draw(st.booleans()) and inner != Shard(1):
        placements = (StridedRaggedShard(dims, units, factor), Replicate(), inner)
    shape = (24, 6, 4)
    try:
        piece_of(shape, placements, mesh, (0, 0, 0))
    except LayoutError:
        return
    counts = torch.zeros(shape, dtype=torch.long)
    for at in itertools.product(*map(range, mesh)):
        for box in piece_of(shape, placements, mesh, at).boxes():
            counts[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
    replicas = [size for size, placement in zip(mesh, placements, strict=True) if isinstance(placement, Replicate)]
    assert (counts == torch.tensor(replicas).prod()).all()


@pytest.mark.parametrize(
    ("shape", "placements", "mesh", "message"),
    [
        ((8, 4), (RaggedShard((0,), (1, 1, 1)),), (2,), "units for 3 ranks, the mesh axis has 2"),
        ((8,), (RaggedShard((0, 1), (1, 1)),), (2,), r"flattens 2 dims, the tensor of shape \(8,\) has 1"),
        ((8,), (RaggedShard((), (0, 1)),), (2,), r"is for 0-dim tensors, got shape \(8,\)"),
        ((8, 4), (RaggedShard((0, 1), (1, 1)), Shard(1)), (2, 2), "cut the same dim 1"),
        ((8, 4), (RaggedShard((0,), (1, 1)), Shard(0)), (2, 2), "Use StridedRaggedShard"),
        ((8, 4), (StridedRaggedShard((0,), (1, 1), 3), Shard(0)), (2, 2), "split_factor 3; .* have 2 pieces"),
        ((8, 4), (RaggedShard((0,), (1, 1)), Shard(2)), (2, 2), r"needs a dim of a tensor of shape \(8, 4\)"),
        ((8, 4), (RaggedShard((0,), (1, 1)),), (2, 2), "one placement per mesh axis, got 1"),
        ((8, 4), (RaggedShard((0,), (1, 1)), _StridedShard(0, split_factor=2)), (2, 2), "cannot stand beside a ragged"),
    ],
)
def test_what_does_not_fit_is_refused(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: tuple[int, ...], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        piece_of(shape, placements, mesh, (0,) * len(mesh))


def test_units_that_fit_some_pieces_only_are_refused_on_every_rank() -> None:
    # Shard(0) of 5 rows over 2 ranks gives 3 and 2 rows; 3 units fit the first alone.
    placements = (Shard(0), RaggedShard((0,), (1, 2)))
    for at in itertools.product(range(2), range(2)):
        with pytest.raises(LayoutError, match="2 rows do not split into 3 units"):
            piece_of((5, 4), placements, (2, 2), at)
