"""What wrapping costs does not depend on the number of ranks: calls are counted, on shapes of a public model."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale_fsdp import fully_shard


class Layer(nn.Module):
    """A layer of GPT-OSS-120B: 128 fused experts, which 256 ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2880)
        self.qkv, self.out, self.router = nn.Linear(2880, 5120), nn.Linear(4096, 2880), nn.Linear(2880, 128)
        self.w13 = nn.Parameter(torch.empty(128, 2880, 5760))
        self.b13 = nn.Parameter(torch.empty(128, 5760))
        self.w2 = nn.Parameter(torch.empty(128, 2880, 2880))
        self.b2 = nn.Parameter(torch.empty(128, 2880))


def calls_to_wrap(mesh: DeviceMesh, num_layers: int = 4) -> int:
    """Functions, of Python and C, that run while a model is wrapped."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(num_layers)), nn.Linear(2880, 201088, bias=False))
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # what finalizers of earlier models call is not of this one
    sys.setprofile(count)
    try:
        for layer in list(model)[:-1]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@ranks(1)
def test_wrapping_over_256_ranks_takes_the_calls_that_it_takes_over_8() -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=256)
    many = init_device_mesh("cpu", (256,))
    few = init_device_mesh("cpu", (32, 8), mesh_dim_names=("rest", "few"))["few"]
    for mesh in (many, few):
        calls_to_wrap(mesh)  # what is remembered from one model to the next
    assert calls_to_wrap(many) <= 1.02 * calls_to_wrap(few)
