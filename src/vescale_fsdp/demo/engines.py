"""The four ways to run one model over ranks, behind one call: `ENGINES[name].wrap(model, settings)`.

An engine only wraps. Batches, loss, clipping, optimizer and counting are the loop's, so they are the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vescale_fsdp.demo.model import GPT
from vescale_fsdp.demo.settings import Dtype, EngineName, OptimizerName, Settings
from vescale_fsdp.fully_shard import fully_shard
from vescale_fsdp.optim import AdamW8bit
from vescale_fsdp.policy import ParamPolicy
from vescale_fsdp.report import report

__all__ = ["ENGINES", "Engine", "Group"]


@dataclass(frozen=True)
class Group:
    """Parameters that travel together: `numel` of them, `padding` elements beside them over all ranks.

    `asked`: what may not be cut, and which plugin asked for it.
    """

    name: str
    num_tensors: int
    numel: int
    padding: int
    nbytes_per_rank: int
    asked: tuple[str, ...] = ()


class Engine(Protocol):
    """`casts`: the engine casts parameters itself, so the loop must not autocast."""

    casts: bool

    def wrap(self, model: GPT, settings: Settings) -> nn.Module: ...

    def groups(self, model: nn.Module) -> tuple[Group, ...]: ...


class Single:
    """One process, nothing sharded: the reference."""

    casts = False

    def wrap(self, model: GPT, settings: Settings) -> nn.Module:
        return model

    def groups(self, model: nn.Module) -> tuple[Group, ...]:
        params = list(model.parameters())
        nbytes = sum(param.nbytes for param in params)
        return (Group("whole model", len(params), sum(param.numel() for param in params), 0, nbytes),)


class DDP(Single):
    """torch's DistributedDataParallel: every rank holds everything, gradients are all-reduced in buckets."""

    def wrap(self, model: GPT, settings: Settings) -> nn.Module:
        return DistributedDataParallel(model)


class Vescale:
    """`vescale_fsdp.fully_shard`: ragged shards, planned group by group."""

    casts = True

    def wrap(self, model: GPT, settings: Settings) -> nn.Module:
        mesh, policy, wishes = _mesh(), _policy(settings), partial(_wish, settings)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, param_policy=wishes)
        fully_shard(model, mesh=mesh, mp_policy=policy, param_policy=wishes)
        return model

    def groups(self, model: nn.Module) -> tuple[Group, ...]:
        return tuple(
            Group(
                part.name or "root",
                len(part.plan.tensors),
                part.plan.numel,
                part.plan.padding,
                part.shard_nbytes,
                tuple(dict.fromkeys(reason for spec in part.plan.specs for reason in spec.granularity.reasons)),
            )
            for part in report(model).groups
        )


class FSDP2:
    """torch's own `fully_shard`: every parameter padded to whole rows per rank."""

    casts = True

    def wrap(self, model: GPT, settings: Settings) -> nn.Module:
        mesh, policy = _mesh(), _policy(settings)
        for block in model.blocks:
            fsdp2_fully_shard(block, mesh=mesh, mp_policy=policy)
        fsdp2_fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    def groups(self, model: nn.Module) -> tuple[Group, ...]:
        members: dict[str, list[DTensor]] = {}
        for fqn, param in model.named_parameters():
            assert isinstance(param, DTensor)
            members.setdefault(_unit_of(fqn), []).append(param)
        return tuple(_padded_rows(name, params) for name, params in members.items())


ENGINES: dict[EngineName, Engine] = {
    EngineName.VESCALE: Vescale(),
    EngineName.FSDP2: FSDP2(),
    EngineName.DDP: DDP(),
    EngineName.SINGLE: Single(),
}


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


def _policy(settings: Settings) -> MixedPrecisionPolicy:
    if settings.dtype is Dtype.FP32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _wish(settings: Settings, fqn: str, param: nn.Parameter) -> ParamPolicy | None:
    """Matrices are gathered in the format of the settings; AdamW8bit's blocks stay whole."""
    format = settings.gather_format if param.ndim == 2 else None
    state = AdamW8bit.policy(fqn, param) if settings.optimizer is OptimizerName.ADAMW8BIT else None
    return ParamPolicy(format=format, state_format=state.state_format if state is not None else None)


def _unit_of(fqn: str) -> str:
    """The module that was wrapped and holds this parameter: `blocks.3`, or the root."""
    parts = fqn.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else "root"


def _padded_rows(name: str, params: list[DTensor]) -> Group:
    num_ranks = dist.get_world_size()
    numel = sum(param.numel() for param in params)
    per_rank = sum(-(-param.shape[0] // num_ranks) * (param.numel() // param.shape[0]) for param in params)
    nbytes = per_rank * params[0].element_size()
    return Group(name, len(params), numel, per_rank * num_ranks - numel, nbytes)
