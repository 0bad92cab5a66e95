"""A user's training program around fully_shard, checked by mypy --strict and never run."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    ParamPolicy,
    UnshardHandle,
    clip_grad_norm_,
    explain,
    fully_shard,
    register_fsdp_forward_method,
    report,
    share_comm_ctx,
    traffic,
)


def whole_matrices(fqn: str, param: nn.Parameter) -> ParamPolicy | None:
    return ParamPolicy(granularity="whole") if param.ndim == 2 else None


def wrap(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh) -> FSDPModule:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        assert_type(fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=2), FSDPModule)
    assert_type(fully_shard(blocks, param_policy=whole_matrices, max_lanes=1), list[FSDPModule])
    root = fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(), ignored_params=[next(model.parameters())])
    assert_type(root, FSDPModule)
    fully_shard(model, offload_policy=None)
    register_fsdp_forward_method(model, "generate")
    share_comm_ctx([root])
    return root


def train(model: nn.Module, root: FSDPModule, batches: list[torch.Tensor]) -> int:
    optim = torch.optim.AdamW(model.parameters())
    for index, x in enumerate(batches):
        root.set_requires_gradient_sync(index == len(batches) - 1)
        model(x).sum().backward()
    assert_type(clip_grad_norm_(model.parameters(), 1.0), torch.Tensor)
    optim.step()
    handle: UnshardHandle | None = root.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    root.reshard()
    print(explain(model))
    padding: float = report(model).padding_pct
    assert padding >= 0
    peak: int | None = report(model).peak_nbytes
    assert peak is None or peak > 0
    return (traffic(model) - traffic(model)).collectives
