"""`save` and `load` between meshes: sharded, with replicas, and with tensor parallelism, at other numbers of ranks."""

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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vescale_fsdp import fully_shard, load, save


def wrap(model: Tower, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def with_replicas(model: Tower) -> nn.Module:
    return wrap(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))


def tensor_parallel(model: Tower) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    for block in model.blocks:
        parallelize_module(
            block, mesh["tp"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        )
    return wrap(model, mesh=mesh["dp_shard"])


MESHES: dict[str, tuple[int, Callable[[Tower], nn.Module]]] = {
    "3 ranks": (3, wrap),
    "replicas": (4, with_replicas),
    "tensor parallel": (4, tensor_parallel),
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
        ("3 ranks", ["replicas", "tensor parallel"]),
    ],
)
def test_what_one_mesh_wrote_another_reads_bit_for_bit(
    rank_pool: RankPool, tmp_path: Path, writer: str, readers: list[str]
) -> None:
    rank_pool.run(MESHES[writer][0], __file__, "write", {"root": str(tmp_path), "mesh": writer})
    for reader in readers:
        rank_pool.run(MESHES[reader][0], __file__, "read", {"root": str(tmp_path), "mesh": reader})
