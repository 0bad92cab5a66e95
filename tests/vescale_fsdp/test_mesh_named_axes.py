"""`dp_mesh_dims`: parameters on the mesh of all parallelisms, whose data axes are named; several names are one axis."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from ragged_dtensor import RaggedShard, StridedRaggedShard
from vescale_fsdp import DataParallelMeshDims, fully_shard, report

Names = tuple[str, ...]
Optim = Callable[..., torch.optim.Optimizer]


class Whole(nn.Module):
    """Two layers on a mesh of all parallelisms: inputs and outputs are this data rank's own rows."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(hidden, 4))
        self.scale = nn.Parameter(torch.ones(hidden))
        self.down = nn.Parameter(torch.randn(3, hidden))
        self.mesh: DeviceMesh | None = None
        self.data: Names = ()

    def distribute(self, mesh: DeviceMesh, data: Names, tp: str | None) -> None:
        self.mesh, self.data = mesh, data
        for name, dim in (("up", 0), ("scale", None), ("down", 1)):
            placements = [Shard(dim) if axis == tp and dim is not None else Replicate() for axis in self.names]
            setattr(self, name, nn.Parameter(distribute_tensor(getattr(self, name).detach(), mesh, placements)))

    @property
    def names(self) -> Names:
        assert self.mesh is not None
        return self.mesh.mesh_dim_names or ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [Shard(0) if name in self.data else Replicate() for name in self.names] if self.mesh else []
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, rows)
        out = F.linear(torch.tanh(F.linear(x, self.up)) * self.scale, self.down)
        return out.redistribute(placements=rows).to_local() if isinstance(out, DTensor) else out


CASES: list[tuple[tuple[int, ...], Names, Any, Any, str | None]] = [
    ((2, 2), ("dp", "tp"), "dp", None, "tp"),
    ((2, 2), ("tp", "dp"), "dp", None, "tp"),
    ((2, 2), ("dp", "cp"), ("dp", "cp"), None, None),
    ((2, 2), ("rep", "dp"), "dp", "rep", None),
    ((2, 2), ("rep", "tp"), None, "rep", "tp"),
    ((2, 2, 2), ("rep", "dp", "tp"), "dp", "rep", "tp"),
    ((2, 2, 2), ("dp", "cp", "tp"), ("dp", "cp"), None, "tp"),
    ((2, 2, 2), ("rep", "dp", "cp"), ("dp", "cp"), "rep", None),
    ((2, 2, 2), ("a", "b", "tp"), None, ("a", "b"), "tp"),
]


def train(model: nn.Module, x: torch.Tensor, make: Optim) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients of a step, which is taken."""
    optim = make(model.parameters(), lr=0.1, foreach=False)
    loss = (model(x) - 1).square().mean()
    loss.backward()
    grads = {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}
    optim.step()
    return loss.detach(), grads


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def check(
    sizes: tuple[int, ...], names: Names, shard: Any, replicate: Any, tp: str | None, make: Optim = torch.optim.AdamW
) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    dims = DataParallelMeshDims(shard=shard, replicate=replicate)
    data = (*dims.replicate_names, *dims.shard_names)
    num_ranks, rank = 1, 0
    for name in data:
        num_ranks, rank = num_ranks * mesh[name].size(), rank * mesh[name].size() + mesh[name].get_local_rank()
    reference = Whole().double()
    ours, theirs = copy.deepcopy(reference), copy.deepcopy(reference)
    x = batch(0, num_ranks, rank, width=4).double()
    for model, wrap in ((ours, fully_shard), (theirs, torch_fully_shard)):
        model.distribute(mesh, data, tp)
        wrap(model, mesh=mesh, dp_mesh_dims=dims)
    loss, grads = train(ours, x, make)
    assert loss.item() == pytest.approx(train(theirs, x, make)[0].item(), rel=1e-12)
    _, expected = train(reference, batch(0, num_ranks, width=4).double(), make)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-12)
    for mine, other, whole in zip(ours.parameters(), theirs.parameters(), reference.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert isinstance(other, DTensor)
        assert mine.device_mesh.mesh_dim_names == other.device_mesh.mesh_dim_names
        assert [type(p) for p in mine.placements if p.is_replicate()] == [Replicate] * sum(
            p.is_replicate() for p in other.placements
        )
        torch.testing.assert_close(full(mine), whole.detach(), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("case", [case for case in CASES if len(case[0]) == 2], ids=lambda case: "-".join(case[1]))
@ranks(4)
def test_named_axes_train_like_one_process_on_the_meshes_of_fsdp2(case: Any) -> None:
    check(*case)


@pytest.mark.parametrize("case", [case for case in CASES if len(case[0]) == 3], ids=lambda case: "-".join(case[1]))
@ranks(8)
def test_three_named_axes_train_like_one_process_on_the_meshes_of_fsdp2(case: Any) -> None:
    check(*case, make=torch.optim.SGD)  # eight ranks take seconds to resolve AdamW's operations


@ranks(4)
def test_several_data_axes_are_one_in_the_placements() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    model = Whole(hidden=8)
    model.distribute(mesh, ("dp", "cp"), "tp")
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))
    assert model.up.device_mesh.mesh_dim_names == ("dp_cp", "tp")
    assert isinstance(model.up.placements[0], StridedRaggedShard)
    assert (model.up.placements[0].split_factor, model.up.placements[1]) == (2, Shard(0))
    assert isinstance(model.down.placements[0], RaggedShard)
    assert model.down.placements[1] == Shard(1)
    assert report(model).groups[0].plan.num_ranks == 2


@ranks(2)
def test_named_axes_say_what_is_wrong() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match=r"Mesh dim name 'cp' not found in mesh\.mesh_dim_names"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="cp"))
    with pytest.raises(ValueError, match="weight: When dp_mesh_dims is provided, all parameters must be DTensors"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"weight: expected Replicate\(\) on data axis 'dp'"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    dist.barrier()
