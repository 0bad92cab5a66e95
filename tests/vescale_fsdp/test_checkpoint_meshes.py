"""`save` and `load` between meshes: sharded, with replicas, with tensor parallelism and by torch's own fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from small_models import Tower
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from vescale_fsdp import fully_shard, load, save


def wrap(model: Tower, by: Callable[..., nn.Module] = fully_shard, **options: Any) -> nn.Module:
    for block in model.blocks:
        by(block, **options)
    return by(model, **options)


def with_replicas(model: Tower) -> nn.Module:
    return wrap(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))


def tensor_parallel(model: Tower, by: Callable[..., nn.Module] = fully_shard) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    for block in model.blocks:
        parallelize_module(
            block, mesh["tp"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        )
    return wrap(model, by, mesh=mesh["dp_shard"])


def strided(model: Tower) -> nn.Module:
    """As a fused weight of queries, keys and values: each tensor-parallel rank has rows of both halves."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    halves = [_StridedShard(0, split_factor=2)]
    model.embed.weight = nn.Parameter(distribute_tensor(model.embed.weight.detach(), mesh["tp"], halves))
    return wrap(model, mesh=mesh["dp_shard"])


MESHES: dict[str, tuple[int, Callable[[Tower], nn.Module]]] = {
    "3 ranks": (3, wrap),
    "replicas": (4, with_replicas),
    "tensor parallel": (4, tensor_parallel),
    "fsdp2 tensor parallel": (4, lambda model: tensor_parallel(model, fsdp2)),
    "strided": (4, strided),
    "one process": (1, lambda model: model),
}


def made(mesh: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = MESHES[mesh][1](Tower(hidden=10, out=3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = (parameter * 3).sin().detach()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = dict(get_model_state_dict(model))
    for fqn, slots in get_optimizer_state_dict(model, optimizer)["state"].items():
        found |= {f"{fqn}/{key}": value for key, value in slots.items()}  # type: ignore[union-attr]
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}


def write(root: str, mesh: str) -> None:
    model, optimizer = made(mesh, seed=1)
    step(model, optimizer)
    save(f"{root}/checkpoint", model, optimizer)
    values = whole(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(values, f"{root}/whole")


def read(root: str, mesh: str) -> None:
    model, optimizer = made(mesh, seed=2)
    load(f"{root}/checkpoint", model, optimizer, verify=True)
    expected = torch.load(f"{root}/whole")
    found = whole(model, optimizer)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    step(model, optimizer)


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        ("replicas", ["3 ranks", "tensor parallel", "one process"]),
        ("tensor parallel", ["3 ranks", "replicas", "one process"]),
        ("3 ranks", ["replicas", "tensor parallel", "strided"]),
        ("fsdp2 tensor parallel", ["tensor parallel", "strided"]),
        ("strided", ["fsdp2 tensor parallel", "3 ranks", "one process"]),
    ],
)
def test_what_one_mesh_wrote_another_reads_bit_for_bit(
    rank_pool: RankPool, tmp_path: Path, writer: str, readers: list[str]
) -> None:
    rank_pool.run(MESHES[writer][0], __file__, "write", {"root": str(tmp_path), "mesh": writer})
    for reader in readers:
        rank_pool.run(MESHES[reader][0], __file__, "read", {"root": str(tmp_path), "mesh": reader})
