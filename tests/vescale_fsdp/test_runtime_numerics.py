"""Training with fully_shard equals training in one process, and FSDP2 bit for bit at two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Odd, Tower, batch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from wrapping import full

from vescale_fsdp import MixedPrecisionPolicy, fully_shard

Shard = Callable[..., object]


def wrap(shard: Shard, model: nn.Module, **kwargs: object) -> nn.Module:
    """Blocks, then the root."""
    for block in getattr(model, "blocks", ()):
        shard(block, **kwargs)
    shard(model, **kwargs)
    return model


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def train(model: nn.Module, steps: int, *, alone: bool = False, optimizer: type = torch.optim.SGD) -> list[float]:
    """Losses over all ranks' data; `alone` computes them in one process."""
    optim = optimizer(model.parameters(), lr=0.05)
    num_ranks, rank, losses = dist.get_world_size(), dist.get_rank(), []
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        x = batch(step, num_ranks, None if alone else rank).to(dtype)
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        total = loss.detach().clone()
        if not alone:
            dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
    return losses


@pytest.mark.parametrize("model_type", [Tower, Odd])
@ranks(1, 2, 3, 4)
def test_sgd_training_equals_one_process(model_type: type[nn.Module]) -> None:
    reference = model_type()
    sharded = wrap(fully_shard, copy.deepcopy(reference))
    expected = train(reference, 12, alone=True)
    assert train(sharded, 12) == pytest.approx(expected, rel=1e-6)
    for ours, theirs in zip(sharded.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours), theirs.detach(), rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("model_type", [Tower, Odd])
@ranks(1, 2, 3, 4)
def test_adamw_training_in_float64_equals_one_process(model_type: type[nn.Module]) -> None:
    reference = model_type().double()
    sharded = wrap(fully_shard, copy.deepcopy(reference))
    expected = train(reference, 12, alone=True, optimizer=torch.optim.AdamW)
    assert train(sharded, 12, optimizer=torch.optim.AdamW) == pytest.approx(expected, rel=1e-9)
    for ours, theirs in zip(sharded.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours), theirs.detach(), rtol=1e-8, atol=1e-9)


@ranks(2)
def test_gradients_equal_fsdp2_bit_for_bit_at_two_ranks() -> None:
    ours, theirs = Tower(), Tower()
    theirs.load_state_dict(ours.state_dict())
    wrap(fully_shard, ours)
    wrap(torch_fully_shard, theirs)
    for step in range(3):
        x = batch(step, 2, dist.get_rank())
        outputs = [model(x) for model in (ours, theirs)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().mean().backward()
        expected = grads_of(theirs)
        for name, grad in grads_of(ours).items():
            assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("setting", ["default", "sum_only", "factor_ranks", "factor_other"])
@ranks(2)
def test_gradient_division_follows_fsdp2(dtype: torch.dtype, setting: str) -> None:
    results = []
    for shard in (fully_shard, torch_fully_shard):
        torch.manual_seed(3)
        model = nn.Linear(4, 4, dtype=dtype)
        shard(model)
        if setting == "sum_only":
            model.set_force_sum_reduction_for_comms(True)
        elif setting != "default":
            model.set_gradient_divide_factor(2.0 if setting == "factor_ranks" else 3.0)
        if setting == "factor_other" and dtype == torch.float32 and shard is torch_fully_shard:
            model.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM, and FSDP2 insists on it
        model(batch(0, 2, dist.get_rank(), width=4).to(dtype)).sum().backward()
        results.append(grads_of(model)["weight"])
    assert torch.equal(*results)


@ranks(1)
def test_divide_factor_applies_to_a_single_rank() -> None:
    model = nn.Linear(2, 2)
    fully_shard(model)
    model.set_gradient_divide_factor(4.0)
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(full(model.weight.grad), torch.full((2, 2), 0.25))


@pytest.mark.parametrize("sync", ["every", "last"])
@ranks(1, 2, 3)
def test_accumulated_gradients_equal_one_large_batch(sync: str) -> None:
    reference = Tower()
    sharded = wrap(fully_shard, copy.deepcopy(reference))
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        sharded.set_requires_gradient_sync(sync == "every" or step == 2)
        reference(batch(step, num_ranks)).square().mean().backward()
        sharded(batch(step, num_ranks, rank)).square().mean().backward()
        assert (sharded.embed.weight.grad is None) == (sync == "last" and step < 2)
    expected = grads_of(reference)
    for name, grad in grads_of(sharded).items():
        torch.testing.assert_close(grad, expected[name])


@ranks(2)
def test_sums_held_without_sync_are_as_wide_as_the_gradients() -> None:
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    for step in range(8):
        model.set_requires_gradient_sync(step == 7)
        model(torch.full((1, 1), 1.0 if step else 256.0)).sum().backward()
    # In bfloat16, 256 + 1 rounds to 256: a narrow sum would stay at 256.
    assert full(model.weight.grad).item() == torch.tensor(263.0).bfloat16().item()


class Late(nn.Module):
    """Two layers of which the second takes part only when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, use_second: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if use_second else x


@ranks(2)
def test_a_parameter_first_used_in_the_last_micro_batch_gets_its_gradient_in_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reference = Late()
    sharded = copy.deepcopy(reference)
    fully_shard(sharded, mp_policy=policy)
    for step in range(3):
        sharded.set_requires_gradient_sync(step == 2)
        for model, rank in ((reference, None), (sharded, dist.get_rank())):
            model(batch(step, 2, rank, width=4), step == 2).float().square().mean().backward()
    for name, grad in grads_of(sharded).items():
        expected = dict(reference.named_parameters())[name].grad
        torch.testing.assert_close(grad, expected, rtol=0.05, atol=0.01)
