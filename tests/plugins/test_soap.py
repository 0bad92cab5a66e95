"""The SOAP plugin over real ranks: an optimizer from outside the package that borrows whole blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ranks import ranks
from sharding import shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from vescale_soap import SOAP

from ragged_dtensor import RaggedShard, StridedRaggedShard
from vescale_fsdp import ParamPolicy, fully_shard

OPTIONS = {"lr": 0.1, "precondition_frequency": 2, "max_preconditioner_dim": 4}


def grads(num_steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(10, 6, generator=generator, dtype=torch.float64) for _ in range(num_steps)]


@ranks(1, 2, 3)
def test_steps_on_shards_equal_steps_on_the_whole_parameter() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = nn.Parameter(torch.ones(10, 6, dtype=torch.float64))
    param = nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [Shard(0)]))
    optimizers = SOAP([whole], **OPTIONS), SOAP([param], **OPTIONS)
    for grad in grads(5):
        whole.grad, param.grad = grad, distribute_tensor(grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    assert isinstance(param, DTensor)
    assert torch.equal(param.full_tensor(), whole)


@ranks(4)
def test_hsdp_and_tensor_parallel_shards_take_the_steps_of_the_whole_parameter() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    cuts: list[Any] = [
        [RaggedShard((0,), (1, 4)), Shard(1)],
        [StridedRaggedShard((0,), (2, 3), 2), Shard(0)],
        [Replicate(), RaggedShard((0,), (3, 7))],
    ]
    whole = nn.Parameter(torch.ones(10, 6, dtype=torch.float64))
    params = [nn.Parameter(shard(whole.detach(), mesh, cut)) for cut in cuts]
    optimizers = SOAP([whole], **OPTIONS), SOAP(params, **OPTIONS)
    for grad in grads(5):
        whole.grad = grad
        for param, cut in zip(params, cuts, strict=True):
            param.grad = shard(grad, mesh, cut)
        for optimizer in optimizers:
            optimizer.step()
    for param, cut in zip(params, cuts, strict=True):
        assert torch.equal(param.to_local(), shard(whole.detach(), mesh, cut).to_local())


@ranks(2)
def test_the_planner_grants_whole_panels_and_then_nothing_travels() -> None:
    module = nn.Linear(4, 12, bias=False)
    fully_shard(module, param_policy=lambda fqn, param: ParamPolicy(optimizer="soap:4"))
    module(torch.ones(2, 4)).sum().backward()
    optimizer = SOAP(module.parameters(), max_preconditioner_dim=4)
    optimizer.step()
    assert "3 matrices of 1 tensors over 2 ranks: 3 lie whole at their owner" in optimizer.explain()
