"""A user's program over several meshes, checked by mypy --strict and never run."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vescale_fsdp import DataParallelMeshDims, FSDPModule, broadcast_replicas, clip_grad_norm_, fully_shard


def hsdp_and_tensor_parallel(model: nn.Module) -> FSDPModule:
    root = init_device_mesh("cuda", (2, 4, 2), mesh_dim_names=("rep", "dp", "tp"))
    parallelize_module(model, root["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    wrapped = fully_shard(model, mesh=root["rep", "dp"])
    assert_type(wrapped, FSDPModule)
    broadcast_replicas(model)
    broadcast_replicas(model, source=1)
    return wrapped


def experts(model: nn.Module, weight: torch.Tensor, root: DeviceMesh) -> FSDPModule:
    expert = nn.Parameter(distribute_tensor(weight, root["ep"], [Shard(0)]))
    model.register_parameter("experts", expert)
    return fully_shard(model, mesh=root["dp"], shard_placement_fn=lambda param: Shard(0) if param is expert else None)


def named_axes(model: nn.Module, root: DeviceMesh) -> list[FSDPModule]:
    one = fully_shard(model, mesh=root, dp_mesh_dims=DataParallelMeshDims(shard="dp", replicate=("rep", "cp")))
    many = fully_shard([model], mesh=root, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))
    return [one, *many]


def norm(model: nn.Module) -> float:
    total = clip_grad_norm_(model.parameters(), max_norm=1.0, norm_type=2.0, error_if_nonfinite=True)
    return assert_type(total, torch.Tensor).item()
