"""A 2-D mesh replicates over its first axis and shards over its second; what is not built says so."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Tower, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from vescale_fsdp import DataParallelMeshDims, fully_shard, traffic


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


@ranks(2)
def test_other_parallelisms_are_refused_by_name_until_they_are_built() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(NotImplementedError, match="dp_mesh_dims"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    with pytest.raises(NotImplementedError, match="weight: is a DTensor"):
        fully_shard(model, mesh=mesh)
