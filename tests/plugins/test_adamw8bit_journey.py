"""AdamW8bit on a model that fully_shard wrapped: wishes granted, training, and torch's own checkpoint calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankPool, ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from vescale_fsdp import FSDPModule, VescaleError, fully_shard, report
from vescale_fsdp.optim import AdamW8bit


def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 160), nn.GELU(), nn.LayerNorm(160), nn.Linear(160, 96, bias=False))


def wrapped() -> tuple[FSDPModule, AdamW8bit]:
    sharded = fully_shard(model(), param_policy=AdamW8bit.policy)
    return sharded, AdamW8bit(sharded.named_parameters(), lr=0.01)


def step(sharded: FSDPModule, optimizer: AdamW8bit, number: int) -> float:
    """Every rank has the same batch: the mean gradient is the same at 1, 2 and 4 ranks, bit by bit."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
    loss = sharded(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@ranks(1, 3)
def test_the_plan_grants_whole_blocks_and_training_falls() -> None:
    sharded, optimizer = wrapped()
    losses = [step(sharded, optimizer, 0) for _ in range(20)]
    assert losses[-1] < 0.3 * losses[0]
    assert "dynamic8_block by vescale-int8" in report(sharded).plan.explain()


@ranks(3)
def test_without_the_wish_the_error_names_parameter_and_remedy() -> None:
    sharded = fully_shard(nn.Linear(100, 100, bias=False))
    with pytest.raises(VescaleError, match=r"weight: cut after \d+ elements, .*param_policy=AdamW8bit.policy"):
        AdamW8bit(sharded.named_parameters())


@ranks(2)
def test_state_lies_as_its_parameter_does() -> None:
    sharded, optimizer = wrapped()
    step(sharded, optimizer, 0)
    weight = dict(sharded.named_parameters())["0.weight"]
    codes = optimizer.state[weight]["exp_avg_codes"]
    assert isinstance(codes, DTensor)
    assert (codes.shape, codes.placements, codes.dtype) == (weight.shape, weight.placements, torch.uint8)


def save(folder: str) -> None:
    sharded, optimizer = wrapped()
    for number in range(2):
        step(sharded, optimizer, number)
    model_state, optimizer_state = get_state_dict(sharded, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load_and_compare(folder: str) -> None:
    sharded, optimizer = wrapped()
    model_state, optimizer_state = get_state_dict(sharded, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(sharded, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    never_stopped, reference = wrapped()
    for number in range(2):
        step(never_stopped, reference, number)
    for number in range(2, 5):
        assert step(sharded, optimizer, number) == step(never_stopped, reference, number)
    pairs = zip(sharded.parameters(), never_stopped.parameters(), strict=True)
    for mine, theirs in pairs:
        for key, expected in reference.state[theirs].items():
            found = optimizer.state[mine][key]
            assert found.dtype == expected.dtype
            full = [each.full_tensor() if isinstance(each, DTensor) else each for each in (found, expected)]
            assert torch.equal(*full), (dist.get_rank(), key)


def test_a_checkpoint_of_two_ranks_resumes_on_four_and_one(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(2, __file__, "save", {"folder": str(tmp_path)})
    for num_ranks in (4, 1):
        rank_pool.run(num_ranks, __file__, "load_and_compare", {"folder": str(tmp_path)})
