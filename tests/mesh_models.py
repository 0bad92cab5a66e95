"""A small mixture of experts for every combination of meshes, and the meshes of one run by what they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F


@dataclass(frozen=True)
class Meshes:
    """`data` for most parameters; experts over `ep`, which borrows data ranks, sharded over the rest of them."""

    root: DeviceMesh
    data: DeviceMesh
    expert_data: DeviceMesh
    ep: DeviceMesh
    tp: DeviceMesh
    experts: DeviceMesh
    """ep, and tp if that has more than one rank."""

    @classmethod
    def of(cls, rep: int | None, edp: int, ep: int, tp: int) -> Meshes:
        """`rep` None: no axis of replicas."""
        root = init_device_mesh("cpu", (rep or 1, edp, ep, tp), mesh_dim_names=("rep", "edp", "ep", "tp"))
        root["edp", "ep"]._flatten("dp")
        return cls(
            root,
            root["dp"] if rep is None else root["rep", "dp"],
            root["edp"] if rep is None else root["rep", "edp"],
            root["ep"],
            root["tp"],
            root["ep"] if tp == 1 else root["ep", "tp"],
        )

    @property
    def num_data_ranks(self) -> int:
        return self.data.size()

    @property
    def data_rank(self) -> int:
        number = 0
        for size, at in zip(self.data.shape, self.data.get_coordinate() or (), strict=True):
            number = number * size + at
        return number

    def mean(self, value: torch.Tensor) -> float:
        """Over all ranks with data of their own."""
        total = value.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        return total.item()


class Experts(nn.Module):
    """Each row of the input goes to one of `num_experts` two-layer perceptrons, all of them in two 3-D weights."""

    def __init__(self, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) / hidden**0.5)
        self.register_buffer("router", torch.randn(width, num_experts))
        self.first = 0
        self.ep: Any = None
        self.tp: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = (getattr(w, "to_local", lambda w=w: w)() for w in (self.up, self.down))
        rows = _Enter.apply(_Spread.apply(x, self.ep), self.tp)
        expert = (rows.detach() @ self.router).argmax(dim=1)
        out = rows * 0 + (up.sum() + down.sum()) * 0  # ranks without experts or tokens take part in backward
        for i in range(up.shape[0]):
            mine = expert == self.first + i
            out[mine] = F.gelu(rows[mine] @ up[i]) @ down[i]
        return x + _Collect.apply(_Leave.apply(out, self.tp), self.ep)


class MixtureModel(nn.Module):
    """An input layer, dense blocks whose two layers may be tensor parallel, experts, an output layer."""

    def __init__(self, width: int = 8, hidden: int = 8, num_experts: int = 4, out: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.experts = Experts(width, hidden, num_experts)
        self.head = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(self.experts(x))


def parallelize(model: MixtureModel, meshes: Meshes, kind: str) -> None:
    """`kind`: none, tp0 (weights Shard(0)), tp1 (weights Shard(1)), tp (both), ep, ep_tp."""
    plans: dict[str, Any] = {
        "tp0": {"up": ColwiseParallel(output_layouts=Replicate())},
        "tp1": {"down": RowwiseParallel(input_layouts=Replicate())},
        "tp": {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()},
    }
    plans["ep_tp"] = plans["tp"]
    if kind in plans:
        parallelize_module(model, meshes.tp, plans[kind])
    if kind in ("ep", "ep_tp"):
        experts = model.experts
        cuts = {"up": [Shard(0), Shard(2)], "down": [Shard(0), Shard(1)]}
        for name, placements in cuts.items():
            weight = getattr(experts, name)
            placed = distribute_tensor(weight.detach(), meshes.experts, placements[: meshes.experts.ndim])
            setattr(experts, name, nn.Parameter(placed))
        num_experts, ep = experts.router.shape[1], meshes.ep.size()
        experts.first = -(-num_experts // ep) * meshes.ep.get_local_rank()
        experts.ep = meshes.ep.get_group()
        experts.tp = meshes.tp.get_group() if meshes.tp.size() > 1 else None


def _summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    if group is None:
        return x
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def _all(x: torch.Tensor, group: Any) -> torch.Tensor:
    if group is None:
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _own(x: torch.Tensor, group: Any) -> torch.Tensor:
    return x if group is None else x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


class _Spread(torch.autograd.Function):
    """Every rank of the group gets the rows of all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _all(x, group).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _own(_summed(grad, ctx.group), ctx.group), None


class _Collect(torch.autograd.Function):
    """The sum over ranks of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _own(_summed(x, group), group).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _all(grad, ctx.group), None


class _Enter(torch.autograd.Function):
    """Into a tensor parallel part, whose ranks each see some of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _summed(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    """Out of a tensor parallel part, whose ranks each have a summand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _summed(x, group).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None
