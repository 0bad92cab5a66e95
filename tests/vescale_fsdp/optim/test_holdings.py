"""What a rank holds of a whole matrix, checked against indexing a tensor of element numbers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ragged_dtensor import RaggedShard, StridedRaggedShard
from vescale_fsdp.optim.holdings import holding_of, piece_at, unflattened
from vescale_fsdp.optim.matrices import matrices_of

LAYOUTS: list[tuple[tuple[int, ...], tuple[Any, ...], tuple[int, ...], dict[str, Any]]] = [
    ((4, 3), (RaggedShard((0, 1), (5, 7)),), (2,), {}),
    ((4, 3), (RaggedShard((0,), (0, 3, 1)),), (3,), {}),
    ((5, 3), (Shard(0),), (4,), {}),
    ((4, 6), (Replicate(), Shard(1)), (2, 3), {}),
    ((8, 6), (StridedRaggedShard((0,), (1, 3), 2), Shard(0)), (2, 2), {}),
    ((8, 6), (_StridedShard(0, split_factor=2), Shard(0)), (2, 2), {}),
    ((8, 6), (RaggedShard((0,), (3, 5)), Shard(1)), (2, 2), {}),
    ((16, 6), (RaggedShard((0, 1), (17, 31)),), (2,), {"split": (8, 4, 4)}),
    ((3, 4, 5), (RaggedShard((0, 1, 2), (7, 23, 30)),), (3,), {}),
    ((4, 4, 6), (RaggedShard((0,), (1, 3)), Shard(2)), (2, 2), {"split": (2, 2)}),
    ((4, 4, 6), (RaggedShard((0,), (1, 3)), Shard(1)), (2, 2), {"split": (3, 1)}),
    ((8, 3, 3, 3), (RaggedShard((0, 1, 2, 3), (100, 116)),), (2,), {}),
    ((8, 4, 3, 3), (RaggedShard((0,), (3, 5)), Shard(1)), (2, 2), {}),
    ((3, 1, 5), (RaggedShard((0, 1, 2), (7, 8)),), (2,), {}),
]


@pytest.mark.parametrize(("shape", "placements", "mesh", "options"), LAYOUTS)
def test_the_holdings_of_all_ranks_fill_every_matrix_exactly_once(
    shape: tuple[int, ...], placements: tuple[Any, ...], mesh: tuple[int, ...], options: dict[str, Any]
) -> None:
    numbers = torch.arange(torch.Size(shape).numel())
    replicas = [axis for axis, placement in enumerate(placements) if placement == Replicate()]
    for matrix in matrices_of(shape, **options):
        built = torch.full(unflattened(matrix, shape), -1)
        for coordinate in itertools.product(*map(range, mesh)):
            if any(coordinate[axis] for axis in replicas):
                continue
            piece = piece_at(shape, placements, mesh, coordinate)
            local = _local(numbers.view(shape), piece)
            held = holding_of(matrix, shape, piece)
            if held is None:
                continue
            run = local[held.start : held.start + held.numel]
            held.scatter(run, built)
            back = torch.full_like(run, -2)
            held.collect(built, back)
            assert torch.equal(back, run)
            if held.begin is not None:
                assert torch.equal(run, numbers[matrix.begin + held.begin :][: held.numel])
        assert torch.equal(built.flatten(), numbers[matrix.begin : matrix.end])


def _local(full: torch.Tensor, piece: Any) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
        full = full.narrow(dim, offset, size)
    if piece.num_flat is None:
        return full.flatten()
    return full.flatten(0, piece.num_flat - 1)[piece.begin : piece.end].flatten()


def test_a_run_that_ends_inside_a_row_is_three_blocks_and_one_flat_run() -> None:
    (matrix,) = matrices_of((4, 3))
    held = holding_of(matrix, (4, 3), piece_at((4, 3), (RaggedShard((0, 1), (4, 6, 2)),), (3,), (1,)))
    assert held is not None
    assert (held.start, held.numel, held.begin, len(held.blocks)) == (0, 6, 4, 3)


def test_columns_under_tensor_parallelism_are_no_flat_run() -> None:
    (matrix,) = matrices_of((4, 6))
    held = holding_of(matrix, (4, 6), piece_at((4, 6), (Shard(1),), (2,), (1,)))
    assert held is not None
    assert held.begin is None
    assert held.blocks[0].offsets == (0, 3)
