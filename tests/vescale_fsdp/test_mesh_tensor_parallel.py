"""Parameters that tensor parallelism made DTensors: sharded inside what it left, on one mesh of both, and exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Tower, batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from vescale_fsdp import fully_shard


def meshes(shape: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh]:
    """Data mesh and tp mesh of a root of (dp, tp) or (rep, dp, tp)."""
    names = ("rep", "dp", "tp")[-len(shape) :]
    root = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return root[names[:-1]], root["tp"]


def parallelize(model: Tower, tp: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, tp, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})


def data_rank(data: DeviceMesh) -> tuple[int, int]:
    """How many ranks have data of their own, and this rank's number among them."""
    number = 0
    for size, at in zip(data.shape, data.get_coordinate() or (), strict=True):
        number = number * size + at
    return data.size(), number


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module, data: DeviceMesh | None, sizes: tuple[int, int], steps: int = 3) -> list[float]:
    optim = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    num_ranks, rank = sizes
    losses = []
    for step in range(steps):
        x = batch(step, num_ranks, None if data is None else rank).double()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        total = loss.detach().clone()
        if data is not None:
            for axis in range(data.ndim):
                dist.all_reduce(total, dist.ReduceOp.AVG, group=data.get_group(axis))
        losses.append(total.item())
    return losses


@pytest.mark.parametrize("hidden", [16, 5, 7])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)])
@ranks(4)
def test_tensor_parallel_training_equals_one_process_and_fsdp2(shape: tuple[int, ...], hidden: int) -> None:
    data, tp = meshes(shape)
    reference = Tower(hidden=hidden).double()
    expected = train(copy.deepcopy(reference), None, (data.size(), 0))
    losses = []
    for shard in (fully_shard, torch_fully_shard):
        model: Any = copy.deepcopy(reference)
        parallelize(model, tp)
        for block in model.blocks:
            shard(block, mesh=data)
        shard(model, mesh=data)
        losses.append(train(model, data, data_rank(data)))
        if shard is fully_shard:
            ours = model
    assert losses[0] == pytest.approx(expected, rel=1e-9)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    trained = copy.deepcopy(reference)
    train(trained, None, (data.size(), 0))
    for mine, theirs in zip(ours.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(full(mine), theirs.detach(), rtol=1e-8, atol=1e-9)
