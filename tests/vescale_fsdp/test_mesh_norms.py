"""Norms over any mix of meshes, placements and plain tensors: each element counts once, and all ranks agree."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mesh_models import Meshes, MixtureModel, parallelize
from ranks import ranks
from small_models import Tower, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vescale_fsdp import clip_grad_norm_, fully_shard
from vescale_fsdp.grad_clip import get_total_norm


def everywhere(value: torch.Tensor) -> list[float]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value.item())
    return values


def with_grad(tensor: torch.Tensor, grad: torch.Tensor | None) -> nn.Parameter:
    param = nn.Parameter(tensor)
    param.grad = grad
    return param


@ranks(4)
def test_gradients_on_two_meshes_and_plain_ones_count_once() -> None:
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ones = torch.ones(4, 4)
    tensors = [
        distribute_tensor(ones, world, [Shard(0)]),
        distribute_tensor(ones, root["tp"], [Shard(1)]),
        distribute_tensor(ones, root, [Replicate(), Shard(0)]),
        distribute_tensor(ones, root, [Shard(0), Shard(1)]),
        ones,
    ]
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        params = [with_grad(each, each.clone() * factor) for factor, each in enumerate(tensors, start=1)]
        expected = torch.cat([factor * ones.view(-1) for factor in range(1, 6)]).norm(norm_type)
        total = clip_grad_norm_(params, 1.0, norm_type)
        assert type(total) is torch.Tensor
        assert everywhere(total) == pytest.approx([expected.item()] * 4, rel=1e-6), norm_type
        for factor, param in enumerate(params, start=1):
            grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            torch.testing.assert_close(grad, factor * ones / (expected + 1e-6))


@ranks(4)
def test_ones_on_four_ranks_and_ones_on_two_of_them_have_norm_root_32() -> None:
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "ep"))
    params = [
        with_grad(each, each.clone())
        for each in (distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]) for mesh in (world, pairs["ep"]))
    ]
    assert clip_grad_norm_(params, 1.0).item() == pytest.approx(math.sqrt(32))
    for param in params:
        torch.testing.assert_close(param.grad.full_tensor(), torch.ones(4, 4) / math.sqrt(32))


@ranks(4)
def test_a_gradient_that_only_some_ranks_have_counts_and_nobody_waits() -> None:
    """Also where its mesh comes first for some ranks and last for others."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rank = dist.get_rank()
    first = distribute_tensor(torch.ones(4, 4), pairs["b"], [Shard(0)])
    second = distribute_tensor(torch.ones(4, 4), pairs["a"], [Shard(0)])
    params = [
        with_grad(first, first.clone() if rank in (0, 3) else None),
        with_grad(second, second.clone() if rank in (1, 2) else None),
    ]
    total = clip_grad_norm_(params, 1e9)
    # Ranks 0 and 1 hold the halves of one copy of `first`, of which rank 0 alone has a gradient; and so on.
    assert total.item() == pytest.approx(math.sqrt(8 + 8))


@ranks(4)
def test_a_nonfinite_part_on_one_rank_raises_on_all_and_changes_nothing() -> None:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for bad, norm_type in itertools.product((math.nan, math.inf), (2.0, math.inf)):
        grads = [
            distribute_tensor(torch.ones(4, 4), root, [Shard(0), Shard(1)]),
            distribute_tensor(torch.ones(4, 4), root["dp"], [Shard(0)]),
        ]
        if dist.get_rank() == 2:
            grads[0].to_local()[0, 0] = bad
        params = [with_grad(grad.detach().clone(), grad) for grad in grads]
        before = [grad.to_local().clone() for grad in grads]
        values = everywhere(get_total_norm(grads, norm_type))
        assert all(math.isnan(value) if math.isnan(bad) else value == math.inf for value in values)
        with pytest.raises(RuntimeError, match=r"cannot be clipped to\. No gradient was changed"):
            clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
        for grad, old in zip(grads, before, strict=True):
            torch.testing.assert_close(grad.to_local(), old, equal_nan=True)


@ranks(8)
def test_clipping_under_every_parallelism_at_once_equals_one_process() -> None:
    meshes = Meshes.of(None, 2, 2, 2)
    reference = MixtureModel().double()
    model = copy.deepcopy(reference)
    parallelize(model, meshes, "ep_tp")
    experts = set(model.experts.parameters())
    own = ShardPlacementResult(Shard(0), FSDPMeshInfo(meshes.expert_data, 0))
    fully_shard(model, mesh=meshes.data, shard_placement_fn=lambda param: own if param in experts else None)
    for norm_type in (1.0, 2.0, math.inf):
        for each, rank in ((reference, None), (model, meshes.data_rank)):
            each.zero_grad()
            (each(batch(0, 4, rank).double()) - 1).square().mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
        total = clip_grad_norm_(model.parameters(), 0.01, norm_type)
        assert everywhere(total) == pytest.approx([expected.item()] * 8, rel=1e-6)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-6, atol=1e-9)


@ranks(4)
def test_torchs_own_clipping_equals_one_process_where_all_parameters_are_on_one_mesh() -> None:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = Tower().blocks[0]
    model = copy.deepcopy(reference)
    model.norm = copy.deepcopy(reference.norm)
    for name, param in list(model.norm.named_parameters()):
        setattr(model.norm, name, nn.Parameter(distribute_tensor(param.detach(), root["tp"], [Replicate()])))
    parallelize_module(
        model,
        root["tp"],
        {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)},
    )
    fully_shard(model, mesh=root["dp"])
    for each, rank in ((reference, None), (model, root.get_local_rank("dp"))):
        x = batch(0, 2, rank)
        if each is model:
            x = distribute_tensor(x, root["tp"], [Replicate()])
        out = each(x)
        out.square().mean().backward()
    clips = (torch.nn.utils.clip_grad_norm_, clip_grad_norm_)
    for norm_type, clip in itertools.product((1.0, 2.0, math.inf), clips):
        pair = [copy.copy(param.grad) for param in model.parameters()]
        expected = torch.nn.utils.get_total_norm([param.grad for param in reference.parameters()], norm_type)
        total = torch.nn.utils.get_total_norm(pair, norm_type)
        total = total.full_tensor() if isinstance(total, DTensor) else total
        assert everywhere(total) == pytest.approx([expected.item()] * 4, rel=1e-5)
        value = clip(model.parameters(), 1e9, norm_type)
        value = value.full_tensor() if isinstance(value, DTensor) else value
        assert everywhere(value) == pytest.approx([expected.item()] * 4, rel=1e-5)
