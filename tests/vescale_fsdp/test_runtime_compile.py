"""torch.compile per block, and placements and wishes per parameter."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Tower, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

from ragged_dtensor import RaggedShard
from vescale_fsdp import ParamPolicy, fully_shard, report


def assert_same_grads(ours: nn.Module, reference: nn.Module) -> None:
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("style", ["compiled_module", "in_place"])
@ranks(2)
def test_blocks_compile_without_graph_breaks_and_once(style: str) -> None:
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    reference = Tower()
    model = copy.deepcopy(reference)
    for index, block in enumerate(model.blocks):
        if style == "in_place":
            block.compile(fullgraph=True, backend=counter)
        else:
            model.blocks[index] = torch.compile(block, fullgraph=True, backend=counter)
        fully_shard(model.blocks[index])
    fully_shard(model)
    for step in range(3):
        model(batch(step, 2, dist.get_rank())).square().mean().backward()
        reference(batch(step, 2)).square().mean().backward()
    assert_same_grads(model, reference)
    assert counter.frame_count == 1  # both blocks share one graph, and steps do not recompile


@ranks(2)
def test_shard_on_a_dim_that_does_not_divide_is_accepted() -> None:
    reference = nn.Linear(5, 4)
    model = copy.deepcopy(reference)
    fully_shard(model, shard_placement_fn=lambda param: Shard(param.ndim - 1))
    for each, rank in ((reference, None), (model, dist.get_rank())):
        each(batch(0, 2, rank, width=5)).square().mean().backward()
    assert_same_grads(model, reference)
    with pytest.raises(ValueError, match=r"weight: shard_placement_fn gave .*3.*, but the parameter has 2 dims"):
        fully_shard(nn.Linear(5, 4, bias=False), shard_placement_fn=lambda param: Shard(3))


@ranks(4)
def test_a_parameter_can_have_a_mesh_of_its_own() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    info = FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)
    reference = Tower()
    model = copy.deepcopy(reference)
    head = set(model.head.parameters())
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (4,)),
        shard_placement_fn=lambda param: ShardPlacementResult(None, info) if param in head else None,
    )
    for each, rank in ((reference, None), (model, dist.get_rank())):
        each(batch(0, 4, rank)).square().mean().backward()
    assert {group.plan.num_ranks for group in report(model).groups} == {4, 2}
    assert model.head.weight.device_mesh.size() == 2
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        grad = mine.grad.full_tensor()
        if "head" in name:  # averaged over its two ranks alone
            dist.all_reduce(grad, dist.ReduceOp.AVG)
        torch.testing.assert_close(grad, theirs.grad)


@ranks(2)
def test_wishes_decide_where_parameters_may_be_cut() -> None:
    model = Tower()
    fully_shard(
        model,
        param_policy=lambda fqn, param: ParamPolicy(granularity="whole") if fqn.endswith("up.weight") else None,
    )
    for block in model.blocks:
        assert block.up.weight.to_local().shape[0] in (0, 16)
    assert "whole" in str(report(model).plan.to_json())


@ranks(2)
def test_cuts_lie_between_rows_where_that_costs_nothing() -> None:
    model = Tower(width=16, hidden=32)
    fully_shard(model)
    for param in model.parameters():
        placement = param.placements[0]
        assert isinstance(placement, RaggedShard)
        assert isinstance(param, DTensor)
        assert param.to_local().ndim == param.ndim


@ranks(2)
def test_a_compiled_root_breaks_at_wrapped_modules_and_trains_like_the_reference() -> None:
    import torch._dynamo

    torch._dynamo.reset()
    reference = Tower()
    model = copy.deepcopy(reference)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        compiled(batch(step, 2, dist.get_rank())).square().mean().backward()
        reference(batch(step, 2)).square().mean().backward()
    assert_same_grads(model, reference)


@ranks(2)
def test_one_graph_of_a_whole_model_is_refused_where_the_runtime_gathers() -> None:
    """Compile blocks with fullgraph=True; a root's graph would have to hold collectives and frees."""
    import torch._dynamo

    torch._dynamo.reset()
    model = Tower()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?i)disable"):
        compiled(batch(0, 2))
