"""Rough use: failed backwards without a reset, interleaved modes, modules run twice, switches flipped between steps."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Tower, batch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from wrapping import full, wrapped

from vescale_fsdp import MixedPrecisionPolicy, fully_shard
from vescale_fsdp.state import find_state


def loss(model: nn.Module, step: int, rank: int | None) -> torch.Tensor:
    return model(batch(step, 2, rank)).float().square().mean()


def assert_same(ours: nn.Module, reference: nn.Module) -> None:
    """Parameters and gradients."""
    for (name, mine), theirs in zip(ours.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            full(mine.detach()), full(theirs.detach()), msg=lambda text, name=name: f"{name}: {text}"
        )
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(
                full(mine.grad), full(theirs.grad), msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("is_first", [True, False])
@ranks(2)
def test_a_backward_that_failed_spoils_nothing_even_without_a_reset(is_first: bool) -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    rank = dist.get_rank()
    if not is_first:
        loss(model, 7, rank).backward()
        model.zero_grad()
    hidden: list[torch.Tensor] = []
    handle = model.blocks[0].register_forward_hook(lambda module, args, out: hidden.append(out))
    failing = loss(model, 0, rank)
    handle.remove()
    hidden[0].register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.backward()
    for step in range(2):
        for each, part in ((model, rank), (reference, None)):
            loss(each, step, part).backward()
        assert_same(model, reference)


@ranks(2)
def test_serving_between_forward_and_backward_changes_nothing() -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    states = [find_state(module) for module in (model, *model.blocks)]
    rank = dist.get_rank()
    for step in range(2):
        training = loss(model, step, rank)
        with torch.no_grad():
            served = model(batch(5, 2))
        with torch.inference_mode():
            assert torch.equal(model(batch(5, 2)), served)
        torch.testing.assert_close(served, reference(batch(5, 2)).detach())
        training.backward()
        loss(reference, step, None).backward()
        assert_same(model, reference)
    for _ in range(3):
        with torch.no_grad():
            model(batch(5, 2))
    assert states[0].schedule.order == []  # serving leaves no record that would grow
    assert all(not state._uses for state in states)


class Twice(Tower):
    """Runs its first block twice, and its second not at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(x))
        return self.head(self.blocks[0](x))


@pytest.mark.parametrize("reshard", [True, False])
@ranks(2)
def test_a_module_that_runs_twice_and_one_that_does_not_train_like_the_reference(reshard: bool) -> None:
    reference = Twice()
    model = wrapped(copy.deepcopy(reference), reshard_after_forward=reshard)
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for step in range(3):
        for each, optim, part in zip((model, reference), optims, (dist.get_rank(), None), strict=True):
            optim.zero_grad(set_to_none=step != 1)
            loss(each, step, part).backward()
            optim.step()
        assert_same(model, reference)


@ranks(2)
def test_zeroed_gradients_accumulate_like_new_ones() -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    optims = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference)]
    for step in range(3):
        for each, optim, part in zip((model, reference), optims, (dist.get_rank(), None), strict=True):
            optim.zero_grad(set_to_none=False)
            loss(each, step, part).backward()
            optim.step()
        assert_same(model, reference)


@ranks(2)
def test_freezing_and_unfreezing_between_steps_equals_the_reference() -> None:
    reference = Tower()
    reference.blocks[1].requires_grad_(False)
    model = wrapped(copy.deepcopy(reference))
    for step in range(4):
        for each, part in ((model, dist.get_rank()), (reference, None)):
            each.zero_grad()
            each.blocks[0].up.weight.requires_grad_(step % 2 == 1)
            each.blocks[1].requires_grad_(step >= 2)
            loss(each, step, part).backward()
        assert_same(model, reference)


@ranks(2)
def test_a_state_dict_taken_and_loaded_between_forward_and_backward_is_whole() -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    with torch.no_grad():
        model(batch(0, 2))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(isinstance(value, DTensor) for value in state.values())
    loss(model, 0, dist.get_rank()).backward()
    model.zero_grad()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(state)
    for each, part in ((model, dist.get_rank()), (reference, None)):
        loss(each, 1, part).backward()
    assert_same(model, reference)


@ranks(2)
def test_a_graph_run_backward_twice_and_inputs_with_gradients_equal_the_reference() -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    inputs = []
    for each, part in ((model, dist.get_rank()), (reference, None)):
        x = batch(0, 2, part).requires_grad_()
        out = each(x).square().mean()
        out.backward(retain_graph=True)
        out.backward()
        inputs.append(x.grad)
    assert_same(model, reference)
    rank = dist.get_rank()
    torch.testing.assert_close(inputs[0], 2 * inputs[1][4 * rank : 4 * rank + 4])


PATTERNS = {
    "last": [False, False, True],
    "first": [True, False, True],
    "middle": [False, True, False, True],
}


@pytest.mark.parametrize("pattern", PATTERNS)
@ranks(2)
def test_switching_synchronisation_in_mixed_precision_equals_fsdp2(pattern: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    source, models = Tower(), []
    for shard in (fully_shard, torch_fully_shard):
        model = wrapped(copy.deepcopy(source), shard, mp_policy=policy)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for step, sync in enumerate(PATTERNS[pattern]):
                model.set_requires_gradient_sync(sync)
                model.set_is_last_backward(step == len(PATTERNS[pattern]) - 1)
                loss(model, step, dist.get_rank()).backward()
            models.append([full(param.grad).clone() for param in model.parameters()])
            optim.step()
            optim.zero_grad()
    for ours, theirs in zip(models[:2], models[2:], strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-4)
