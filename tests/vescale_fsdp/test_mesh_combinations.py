"""Every combination of meshes trains like one process, and like torch's fully_shard with the same parallelism."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from mesh_models import Meshes, MixtureModel, parallelize
from ranks import ranks
from small_models import batch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

from vescale_fsdp import fully_shard


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def wrap(shard: Any, model: MixtureModel, meshes: Meshes, kind: str) -> MixtureModel:
    """Everything in one call; experts that expert parallelism cut go to a mesh of their own."""
    placement_fn = None
    if kind.startswith("ep"):
        experts = set(model.experts.parameters())
        hsdp = meshes.expert_data.ndim == 2
        info = HSDPMeshInfo(meshes.expert_data, 1, 0) if hsdp else FSDPMeshInfo(meshes.expert_data, 0)
        own = ShardPlacementResult(Shard(0), info)

        def placement_fn(param: nn.Parameter) -> ShardPlacementResult | None:
            return own if param in experts else None

    shard(model, mesh=meshes.data, shard_placement_fn=placement_fn)
    if kind.startswith("ep") and shard is torch_fully_shard:
        model.set_gradient_divide_factor(meshes.num_data_ranks)  # type: ignore[operator]
    return model


Optim = Callable[[Any], torch.optim.Optimizer]
adamw: Optim = partial(torch.optim.AdamW, lr=0.05)
momentum: Optim = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
"""A third of AdamW's operations: stock DTensors resolve each anew in every test, on eight ranks for a second."""


def train(
    model: nn.Module, meshes: Meshes, make: Optim, *, alone: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of two steps, and the gradients of the first."""
    optim = make(model.parameters())
    losses, grads = [], {}
    for step in range(2):
        x = batch(step, meshes.num_data_ranks, None if alone else meshes.data_rank, width=6).double()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        if step == 0:
            grads = {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}
        optim.step()
        optim.zero_grad()
        losses.append(loss.item() if alone else meshes.mean(loss))
    return losses, grads


def check(
    sizes: tuple[int | None, int, int, int], kind: str, *, against_torch: bool, optim: Optim = adamw, **model: int
) -> None:
    meshes = Meshes.of(*sizes)
    reference = MixtureModel(width=6, **model).double()
    ours, theirs = copy.deepcopy(reference), copy.deepcopy(reference)
    parallelize(ours, meshes, kind)
    wrap(fully_shard, ours, meshes, kind)
    losses, grads = train(ours, meshes, optim)
    expected, expected_grads = train(reference, meshes, optim, alone=True)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    for (name, mine), other in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert full(mine).shape == other.shape
        torch.testing.assert_close(full(mine), other.detach(), rtol=1e-7, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
    if against_torch:
        parallelize(theirs, meshes, kind)
        wrap(torch_fully_shard, theirs, meshes, kind)
        # Not closer: in float64 FSDP2 divides twice where experts have one data rank, and Adam's epsilon feels it.
        torchs, _ = train(theirs, meshes, optim)
        assert torchs == pytest.approx(losses, rel=1e-6), (torchs, losses)


FOUR = [
    ((None, 4, 1, 1), "none"),
    ((None, 2, 1, 2), "tp0"),
    ((None, 2, 1, 2), "tp1"),
    ((None, 2, 2, 1), "ep"),
    ((None, 1, 2, 2), "ep_tp"),
    ((2, 2, 1, 1), "none"),
    ((2, 1, 1, 2), "tp0"),
    ((2, 1, 1, 2), "tp1"),
    ((2, 1, 2, 1), "ep"),
    ((2, 1, 1, 2), "ep_tp"),
]
EIGHT = [
    ((None, 8, 1, 1), "none"),
    ((None, 4, 1, 2), "tp0"),
    ((None, 4, 1, 2), "tp1"),
    ((None, 4, 2, 1), "ep"),
    ((None, 2, 2, 2), "ep_tp"),
    ((2, 4, 1, 1), "none"),
    ((2, 2, 1, 2), "tp0"),
    ((2, 2, 1, 2), "tp1"),
    ((2, 2, 2, 1), "ep"),
    ((2, 1, 2, 2), "ep_tp"),
]


def named(case: Any) -> str:
    return "x".join(str(size or "") for size in case) if isinstance(case, tuple) else str(case)


@pytest.mark.parametrize(("sizes", "kind"), FOUR, ids=named)
@ranks(4)
def test_four_ranks_train_like_one_process_and_like_fsdp2(sizes: tuple[int | None, int, int, int], kind: str) -> None:
    check(sizes, kind, against_torch=True)


@pytest.mark.parametrize(("sizes", "kind"), EIGHT, ids=named)
@ranks(8)
def test_eight_ranks_train_like_one_process_and_like_fsdp2(sizes: tuple[int | None, int, int, int], kind: str) -> None:
    one_data_rank = kind == "ep_tp" and sizes[1] == 1  # SGD would take the steps of FSDP2, which divides twice there
    check(sizes, kind, against_torch=True, optim=adamw if one_data_rank else momentum)


@pytest.mark.parametrize("hidden", [5, 6, 7, 9, 1])
@ranks(4)
def test_odd_and_small_hidden_sizes_over_two_by_two(hidden: int) -> None:
    """Of one row, half of the tensor parallel ranks hold nothing."""
    for kind in ("tp0", "tp1"):
        check((None, 2, 1, 2), kind, against_torch=False, hidden=hidden)


@pytest.mark.parametrize("num_experts", [5, 3, 1])
@ranks(4)
def test_odd_and_few_experts_over_two_by_two(num_experts: int) -> None:
    check((None, 2, 2, 1), "ep", against_torch=False, num_experts=num_experts)
