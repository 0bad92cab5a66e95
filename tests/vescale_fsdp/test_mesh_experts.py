"""Expert parallelism: weights on a mesh of their own, gradients divided by all data ranks, ranks without tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mesh_models import Meshes, MixtureModel, parallelize
from ranks import ranks
from small_models import batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ragged_dtensor import RaggedShard, StridedRaggedShard
from vescale_fsdp import fully_shard, report, traffic
from vescale_fsdp.preflight import DivergenceError


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def own_mesh(meshes: Meshes, experts: nn.Module) -> Any:
    """A shard_placement_fn that gives the experts the data ranks that expert parallelism left them."""
    params = set(experts.parameters())
    hsdp = meshes.expert_data.ndim == 2
    info = HSDPMeshInfo(meshes.expert_data, 1, 0) if hsdp else FSDPMeshInfo(meshes.expert_data, 0)
    return lambda param: ShardPlacementResult(Shard(0), info) if param in params else None


@pytest.mark.parametrize("rep", [None, 2])
@ranks(4)
def test_expert_gradients_are_divided_by_all_data_ranks_unless_the_user_says_otherwise(rep: int | None) -> None:
    """Every rank's loss has gradient 1 for each element of the weight, and sums reach the experts' owners."""
    meshes = Meshes.of(rep, 2 if rep is None else 1, 2, 1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        grads = []
        for factor in (None, 1.0, 8.0):
            model = nn.Linear(1, 1)
            model.experts = nn.Module()
            weight = distribute_tensor(torch.ones(4, 3, 2, dtype=dtype), meshes.ep, [Shard(0)])
            model.experts.weight = nn.Parameter(weight)
            fully_shard(model, mesh=meshes.data, shard_placement_fn=own_mesh(meshes, model.experts))
            if factor is not None:
                model.set_gradient_divide_factor(factor)
            # Of four data ranks, two hold each half of the experts: each of these sums the tokens of two.
            model(torch.ones(1, 1))  # gathers; the root stays so
            (2 * model.experts.weight.to_local().sum() + 0 * model(torch.ones(1, 1)).sum()).backward()
            grads.append(full(model.experts.weight.grad).unique().item())
        assert grads == [2 * 2 / 4, 2 * 2, 2 * 2 / 8], dtype


def fused(*shape: int) -> nn.Module:
    model = nn.Module()
    model.register_parameter("up", nn.Parameter(torch.randn(*shape)))
    return model


@ranks(4)
def test_fused_experts_are_cut_inside_what_expert_parallelism_left() -> None:
    meshes = Meshes.of(None, 2, 2, 1)
    model: Any = fused(4, 6, 4)
    whole = model.up.detach()
    model.up = nn.Parameter(distribute_tensor(whole, meshes.ep, [Shard(0)]))
    fully_shard(model, mesh=meshes.expert_data)
    assert model.up.device_mesh.mesh_dim_names == ("edp", "ep")
    assert model.up.placements == (StridedRaggedShard((0,), (1, 1), 2), Shard(0))
    mine = 2 * meshes.ep.get_local_rank() + meshes.expert_data.get_local_rank()
    assert torch.equal(model.up.to_local(), whole[mine : mine + 1])


@ranks(8)
def test_four_experts_over_four_shards_and_two_replicas_are_one_expert_a_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("rep", "shard"))
    model: Any = fused(4, 6, 4)
    fully_shard(model, mesh=mesh)
    assert model.up.placements[1] == RaggedShard((0,), (1, 1, 1, 1))
    assert model.up.to_local().shape == (1, 6, 4)


class Local(nn.Module):
    """The experts of one rank as modules of their own; `names` are those of their numbers in the whole model."""

    def __init__(self, numbers: range, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.experts = nn.ModuleDict({str(number): nn.Linear(width, width, bias=False) for number in numbers})
        self.use: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        return x + sum((self.experts[name](x) for name in self.use), torch.zeros_like(x))


@pytest.mark.parametrize("call", ["one", "own"])
@ranks(4)
def test_experts_that_are_modules_with_other_names_on_other_ranks_agree_and_train(call: str) -> None:
    meshes = Meshes.of(None, 2, 2, 1)
    ep = meshes.ep.get_local_rank()
    model: Any = Local(range(2 * ep, 2 * ep + 2), width=4)
    model.use = list(model.experts)
    if call == "one":
        fully_shard(model, mesh=meshes.data, shard_placement_fn=own_mesh(meshes, model.experts))
    else:
        for expert in model.experts.values():
            fully_shard(expert, mesh=meshes.expert_data)
        fully_shard(model, mesh=meshes.data)
    for _ in range(2):
        model(batch(0, 4, dist.get_rank(), width=4)).sum().backward()
    assert {group.plan.num_ranks for group in report(model).groups} == {4, 2}
    assert all(param.grad is not None for param in model.parameters())


@ranks(4)
def test_a_divergence_among_the_experts_of_some_ranks_is_raised_by_all_with_one_text() -> None:
    meshes = Meshes.of(None, 2, 2, 1)
    model: Any = Local(range(2), width=4)
    if dist.get_rank() == 3:
        model.experts["1"] = nn.Linear(4, 4, bias=True)
    fully_shard(model, mesh=meshes.data, shard_placement_fn=own_mesh(meshes, model.experts))
    with pytest.raises(DivergenceError, match="rank 3 wrapped another model than rank 1") as error:
        model(torch.ones(2, 4))
    texts: list[Any] = [None] * 4
    dist.all_gather_object(texts, str(error.value))
    assert len(set(texts)) == 1
    assert traffic(model).collectives == 0


@pytest.mark.parametrize("idle", ["one expert", "all experts"])
@ranks(4)
def test_ranks_without_tokens_for_their_experts_contribute_zeros_and_nobody_hangs(idle: str) -> None:
    meshes = Meshes.of(None, 2, 2, 1)
    model: Any = Local(range(2), width=4)
    weights = [copy.deepcopy(expert.weight) for expert in model.experts.values()]
    fully_shard(model, mesh=meshes.data, shard_placement_fn=own_mesh(meshes, model.experts))
    if idle == "all experts":  # of a group of which nothing is used, FSDP2 has to be told too
        model.set_reduce_scatter_unused_params(True)
    busy = meshes.expert_data.get_local_rank() == 0
    model.use = ["0", "1"] if busy else ["0"] if idle == "one expert" else []
    x = torch.ones(2, 4)
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
    y = x @ model.dense.weight.full_tensor().T + model.dense.bias.full_tensor()
    of_one_rank = torch.ones(2, 4).T @ y.detach()
    first = of_one_rank if idle == "one expert" else of_one_rank / 2
    for expert, weight, expected in zip(model.experts.values(), weights, (first, of_one_rank / 2), strict=True):
        assert expert.weight.shape == weight.shape
        torch.testing.assert_close(full(expert.weight.grad), expected)


@ranks(8)
def test_traffic_of_each_axis_is_what_the_plans_say() -> None:
    meshes = Meshes.of(2, 1, 2, 2)
    model = MixtureModel()
    parallelize(model, meshes, "ep_tp")
    fully_shard(model, mesh=meshes.data, shard_placement_fn=own_mesh(meshes, model.experts))
    model(batch(0, meshes.num_data_ranks, meshes.data_rank)).sum().backward()
    before = traffic(model)
    model(batch(0, meshes.num_data_ranks, meshes.data_rank)).sum().backward()
    moved = traffic(model) - before
    dense, experts = sorted((group.plan for group in report(model).groups), key=lambda plan: -plan.num_ranks)
    assert (dense.num_ranks, experts.num_ranks) == (2, 1)
    # Dense: one gather (a root stays gathered), one reduce-scatter over two shards. The experts, whose shard axis
    # has one rank, move over replicas alone.
    assert (moved.gathers, moved.reduces, moved.all_reduces) == (1, 1, 2)
    assert moved.gathered_bytes == moved.reduced_bytes == 2 * dense.share * 4
    over_replicas = (dense.share + experts.share) * 4
    assert moved.wire_bytes == 2 * dense.share * 4 + over_replicas
    tp_local = {spec.fqn: spec.shape for spec in (*dense.specs, *experts.specs)}
    assert tp_local["up.weight"] == (4, 8)
    assert tp_local["experts.up"] == (2, 8, 4)
