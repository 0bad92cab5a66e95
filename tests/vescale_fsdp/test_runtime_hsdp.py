"""A 2-D mesh replicates over its first axis and shards over its second."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Tower, batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from vescale_fsdp import fully_shard, traffic


@pytest.mark.parametrize("sync", ["every", "reduce_scatter_only"])
@ranks(4)
def test_replicas_train_like_the_reference(sync: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reference = Tower()
    model = copy.deepcopy(reference)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = traffic(model)
    for step in range(3):
        model.set_requires_all_reduce(sync == "every" or step == 2)
        model(batch(step, 4, dist.get_rank())).square().mean().backward()
        reference(batch(step, 4)).square().mean().backward()
    moved = traffic(model) - before
    assert (moved.reduces, moved.all_reduces) == (9, 9 if sync == "every" else 3)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.placements[0] == Replicate()
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
