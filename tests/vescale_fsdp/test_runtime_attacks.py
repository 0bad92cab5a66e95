"""Misuse, failures at every point, odd inputs and outputs: an error that says what to do, or the right result."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Block, Tower, batch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from wrapping import full, wrapped

from vescale_fsdp import MixedPrecisionPolicy, VescaleError, fully_shard
from vescale_fsdp.group import transfer
from vescale_fsdp.group.streams import Streams
from vescale_fsdp.state import find_state


def loss(model: nn.Module, step: int, rank: int | None) -> torch.Tensor:
    return model(batch(step, 2, rank)).float().square().mean()


def assert_same_grads(ours: nn.Module, reference: nn.Module, **close: float) -> None:
    for (name, mine), theirs in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(full(mine.grad), theirs.grad, msg=lambda text, name=name: name + text, **close)


# What is passed to fully_shard


@ranks(2)
def test_nested_lists_and_other_things_are_refused_by_what_they_are() -> None:
    for given in ([[nn.Linear(2, 2)]], torch.ones(2), {"a": nn.Linear(2, 2)}, None):
        with pytest.raises(TypeError, match="takes a module or a flat list of modules, got"):
            fully_shard(given)
    with pytest.raises(ValueError, match="empty list"):
        fully_shard([])


@ranks(2)
def test_a_module_given_twice_or_with_its_parent_is_wrapped_once() -> None:
    layer = nn.Linear(8, 8)
    fully_shard([layer, layer])
    model = Tower()
    fully_shard([model, model.blocks[0]])
    assert find_state(model.blocks[0]) is None
    assert model(layer(batch(0, 1))).shape == (4, 4)


@ranks(2)
def test_a_model_that_torch_wraps_in_part_is_refused() -> None:
    model = Tower()
    torch_fully_shard(model.blocks[0])
    with pytest.raises(VescaleError, match=r"(?s)torch's own fully_shard wraps this module.*FSDPBlock"):
        fully_shard(model)


MISTAKES: dict[str, Callable[[nn.Module], object]] = {
    "wrapping twice": lambda model: fully_shard(model.blocks[0]),
    "nested list": lambda model: fully_shard([[model.embed]]),
    "a container": lambda model: fully_shard(model.blocks),
    "ranks that do not divide": lambda model: fully_shard(model.embed, reshard_after_forward=3),
    "a parameter later": lambda model: setattr(model.blocks[0], "late", nn.Linear(2, 2)),
    "a foreign ignored parameter": lambda model: fully_shard(model.embed, ignored_params=[nn.Parameter(torch.ones(1))]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@ranks(2)
def test_a_mistake_of_one_rank_is_every_ranks_error(mistake: str) -> None:
    model = Tower()
    for block in model.blocks:
        fully_shard(block)

    def run() -> None:
        if dist.get_rank() == 1:
            MISTAKES[mistake](model)
        elif mistake.startswith("a foreign"):
            fully_shard(model.embed)  # the same groups, or the plans would differ
        fully_shard(model)(batch(0, 1))

    with pytest.raises(VescaleError, match=r"rank 1 of 2: |rank 1 wrapped another model") as error:
        run()
    texts: list[Any] = [None] * 2
    dist.all_gather_object(texts, str(error.value))
    assert texts[0] == texts[1]


# Changes after wrapping


@pytest.mark.parametrize("change", ["added", "replaced"])
@ranks(2)
def test_modules_added_or_replaced_after_training_began_are_refused_by_name(change: str) -> None:
    model = wrapped(Tower())
    loss(model, 0, dist.get_rank()).backward()
    if change == "added":
        model.blocks[0].adapter = nn.Linear(8, 8)
    else:
        model.head = nn.Linear(8, 4)
    with pytest.raises(VescaleError, match=r"no fully_shard call manages .*(adapter|head)\.weight"):
        model(batch(0, 1))


@ranks(2)
def test_a_module_wrapped_before_it_is_added_trains_as_a_model_of_its_own() -> None:
    model = wrapped(Tower())
    loss(model, 0, dist.get_rank()).backward()
    model.blocks[0].adapter = fully_shard(nn.Linear(8, 8))
    loss(model, 1, dist.get_rank()).backward()


@ranks(2)
def test_values_assigned_between_steps_are_used_or_refused() -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    loss(model, 0, dist.get_rank()).backward()
    model.zero_grad()
    model.head.weight = nn.Parameter(model.head.weight.detach() * 2)  # sharded
    with torch.no_grad():
        reference.head.weight.mul_(2)
    torch.testing.assert_close(model(batch(1, 2)), reference(batch(1, 2)))
    model.reshard()
    model.head.weight = nn.Parameter(torch.zeros(4, 8))
    with pytest.raises(VescaleError, match=r"head.weight: expected a sharded parameter .DTensor., found a Parameter"):
        model(batch(1, 2))


@ranks(2)
def test_an_assignment_while_parameters_are_gathered_is_refused() -> None:
    model = wrapped(Tower())
    with torch.no_grad():
        model(batch(0, 2))  # the root stays gathered
    model.head.weight = nn.Parameter(torch.zeros(4, 8))
    with pytest.raises(VescaleError, match=r"head.weight.*assigned anew while they were gathered.*Call reshard"):
        model(batch(0, 2))


@ranks(2)
def test_an_evaluation_between_backward_and_step_does_not_hide_the_step() -> None:
    """Under FSDP2 the root, which stays gathered after the evaluation, keeps its values from before the step."""
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    optims = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, reference)]
    for each, rank, optim in zip((model, reference), (dist.get_rank(), None), optims, strict=True):
        loss(each, 0, rank).backward()
        with torch.no_grad():
            each(batch(1, 2))
        optim.step()
    torch.testing.assert_close(model(batch(1, 2)), reference(batch(1, 2)))


class Skips(Tower):
    """Runs the blocks that it is told to."""

    def forward(self, x: torch.Tensor, which: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        x = self.embed(x)
        for index in which:
            x = self.blocks[index](x)
        return self.head(x)


@pytest.mark.parametrize("ahead", ["lists", "recorded"])
@ranks(2)
def test_what_was_gathered_ahead_of_a_forward_that_did_not_come_is_not_used_later(ahead: str) -> None:
    reference = Skips()
    model = wrapped(copy.deepcopy(reference))
    if ahead == "lists":
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    else:
        model.set_num_modules_to_forward_prefetch(1)
    with torch.no_grad():
        model(batch(0, 2))
        model(batch(0, 2), (0,))
        for param in (*model.blocks[1].parameters(), *reference.blocks[1].parameters()):
            param.mul_(3)
    torch.testing.assert_close(model(batch(0, 2)), reference(batch(0, 2)))


@pytest.mark.parametrize("num_modules", [1, 2])
@ranks(2)
def test_prefetch_by_recorded_order_gathers_so_many_ahead_and_changes_no_result(num_modules: int) -> None:
    reference = Skips(depth=5)
    model = wrapped(copy.deepcopy(reference))
    model.set_num_modules_to_forward_prefetch(num_modules)
    groups = [find_state(block).groups[0] for block in model.blocks]
    alive: list[int] = []
    for block in model.blocks:
        block.down.register_forward_hook(
            lambda *_: alive.append(sum(group.is_unsharded or group._pending is not None for group in groups))
        )
    for which in ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4), (0, 3, 1, 2, 4)):
        for each, rank in ((model, dist.get_rank()), (reference, None)):
            each.zero_grad()
            each(batch(0, 2, rank), which).square().mean().backward()
        assert_same_grads(model, reference)
    assert max(alive[:5]) == 1
    assert max(alive[5:10]) == 1 + num_modules
    assert max(alive[10:]) <= 1 + num_modules
    for wrong in (-1, True, 1.5):
        with pytest.raises(ValueError, match="num_modules should be an int >= 0"):
            model.set_num_modules_to_forward_prefetch(wrong)


@ranks(2)
def test_frozen_modules_can_stay_gathered_over_micro_batches() -> None:
    reference = Tower(depth=3)
    reference.blocks[1].requires_grad_(False)
    model = wrapped(copy.deepcopy(reference))
    model.blocks[1].set_reshard_after_forward(False)
    model.blocks[1].set_reshard_after_backward(False)
    gathers = []
    for step in range(3):
        with CommDebugMode() as mode:
            loss(model, step, dist.get_rank()).backward()
        loss(reference, step, None).backward()
        gathers.append(sum(count for op, count in mode.comm_counts.items() if "gather" in str(op)))
    assert gathers[1:] == [5, 5]  # the root once, two blocks twice, the frozen one not at all
    assert_same_grads(model, reference)


@ranks(2)
def test_optimizer_groups_without_our_parameters_keep_torchs_settings() -> None:
    wrapped(Tower())
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    other = nn.Parameter(torch.distributed.tensor.distribute_tensor(torch.ones(4, 4), mesh))
    plain = nn.Parameter(torch.ones(4))
    optim = torch.optim.SGD([other, plain], lr=0.1, foreach=True)
    other.grad, plain.grad = torch.ones_like(other), torch.ones_like(plain)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        optim.step()
    assert optim.param_groups[0]["foreach"] is True


# Failures, and what comes after a reset


POINTS = {
    "before forward": lambda model, fail: model.register_forward_pre_hook(fail),
    "at the first use": lambda model, fail: model.blocks[0].register_forward_pre_hook(fail),
    "in the root's first layer": lambda model, fail: model.embed.register_forward_hook(fail),
    "in a block": lambda model, fail: model.blocks[0].up.register_forward_hook(fail),
    "after a block": lambda model, fail: model.blocks[0].register_forward_hook(fail),
    "in the root's last layer": lambda model, fail: model.head.register_forward_hook(fail),
    "after forward": lambda model, fail: model.register_forward_hook(fail),
    "as backward begins": lambda model, fail: fail_in_backward(model.head, fail),
    "in a block's backward": lambda model, fail: fail_in_backward(model.blocks[0], fail),
    "as backward ends": lambda model, fail: fail_in_backward(model.embed, fail),
}


def fail_in_backward(module: nn.Module, fail: Callable[..., None]) -> Any:
    def on_output(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(fail)

    return module.register_forward_hook(on_output)


def fail(*_: object) -> None:
    raise ZeroDivisionError("planned")


@pytest.mark.parametrize("point", POINTS)
@ranks(2)
def test_after_a_failure_anywhere_a_reset_discards_the_step_and_the_next_is_right(point: str) -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    if point != "at the first use":
        loss(model, 3, dist.get_rank()).backward()
        model.zero_grad()
    handle = POINTS[point](model, fail)
    with pytest.raises(ZeroDivisionError):
        loss(model, 0, dist.get_rank()).backward()
    handle.remove()
    model.reset_iter_state()
    assert all(param.grad is None for param in model.parameters())
    groups = [group for state in find_state(model).schedule.states for group in state.groups]
    assert all(not group.is_unsharded and group._pending is None for group in groups)
    assert all(group._whole is None or not group._whole.is_allocated for group in groups)
    for each, rank in ((model, dist.get_rank()), (reference, None)):
        loss(each, 1, rank).backward()
    assert_same_grads(model, reference)


# Inputs and outputs


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor
    later: object = field(default=None, init=False)


class Pair(NamedTuple):
    value: torch.Tensor
    nothing: None


OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "frozen dataclass": Frozen,
    "named tuple": lambda y: Pair(y, None),
    "torch's own": lambda y: torch.max(y.unsqueeze(0).expand(2, -1, -1), 0),
    "None inside": lambda y: [y, None, {"n": 3, "text": "s"}],
}


class Layer(nn.Module):
    """Takes keyword arguments alone."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.output = output

    def forward(self, *, x: Any, unused: object = None) -> Any:
        x = x if torch.is_tensor(x) else x.value if isinstance(x, Frozen) else x[0]
        return OUTPUTS[self.output](self.layer(x))


class Layers(nn.Module):
    def __init__(self, output: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(output) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x=x, unused={"k": [1, None]})
        return x.value if isinstance(x, Frozen) else x[0]


@pytest.mark.parametrize("output", OUTPUTS)
@ranks(2)
def test_keyword_inputs_and_structured_outputs_equal_the_reference_in_any_precision(output: str) -> None:
    reference = Layers(output)
    model = wrapped(copy.deepcopy(reference))
    cast = wrapped(
        copy.deepcopy(reference), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    )
    for each, rank in ((model, dist.get_rank()), (cast, dist.get_rank()), (reference, None)):
        loss(each, 0, rank).backward()
    assert_same_grads(model, reference)
    assert_same_grads(cast, reference, rtol=0.05, atol=0.02)


class Stream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        return (self.layer(x) for _ in range(2))


class AroundStream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream()

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(self.stream(x))


@ranks(2)
def test_a_generator_runs_while_its_module_stays_gathered_and_is_an_error_when_not() -> None:
    reference = AroundStream()
    model = copy.deepcopy(reference)
    fully_shard(model.stream, reshard_after_forward=False)
    fully_shard(model)
    for mine, theirs in zip(model(batch(0, 2)), reference(batch(0, 2)), strict=True):
        torch.testing.assert_close(mine, theirs)
    fully_shard(reference.stream)
    fully_shard(reference)
    with pytest.raises(VescaleError, match=r"layer.weight.*was called outside the forward of Stream"):
        reference(batch(0, 2))


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> None:
        self.kept = self.layer(x)


@ranks(2)
def test_gradients_through_a_tensor_that_no_forward_returned_are_refused_at_the_step() -> None:
    """FSDP2 trains nothing, without a word."""
    model = Silent()
    fully_shard(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0, 2))
    model.kept.square().mean().backward()
    with pytest.raises(
        VescaleError, match=r"gradients of .'layer.weight', 'layer.bias'. were not reduced.*Return from"
    ):
        optim.step()


# Hooks, shared modules


@ranks(2)
def test_users_hooks_see_and_change_what_they_do_without_sharding() -> None:
    reference = Tower()
    seen: dict[str, list[object]] = {"model": [], "reference": []}
    model = copy.deepcopy(reference)
    for name, each in (("model", model), ("reference", reference)):
        for block in each.blocks:
            block.register_full_backward_hook(
                lambda module, into, out, log=seen[name]: log.append((into[0].shape[1:], out[0].shape[1:]))
            )
            block.register_full_backward_pre_hook(lambda module, out: (out[0] * 2,))
            block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
            block.register_forward_hook(lambda module, args, out: out * 0.5)
    wrapped(model)
    for each, rank in ((model, dist.get_rank()), (reference, None)):
        loss(each, 0, rank).backward()
    assert seen["model"] == seen["reference"]
    assert_same_grads(model, reference)


class OneBlockTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = Block(8, 16)
        self.blocks = nn.ModuleList([block, block])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@ranks(2)
def test_one_block_in_two_places_is_one_group_and_a_layer_in_two_blocks_is_refused() -> None:
    reference = OneBlockTwice()
    model = copy.deepcopy(reference)
    fully_shard(model.blocks[0])
    fully_shard(model)
    for each, rank in ((model, dist.get_rank()), (reference, None)):
        loss(each, 0, rank).backward()
    assert_same_grads(model, reference)
    other = Tower()
    other.blocks[1].norm = other.blocks[0].norm
    with pytest.raises(ValueError, match=r"norm.weight is the same parameter as norm.weight.*one group"):
        wrapped(other)


class Recorder(Streams):
    """Device streams that only write down what they are asked."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def gathered(self, lane: int) -> Any:
        self.log.append("gathered")
        return object()

    def use(self, event: Any) -> None:
        self.log.append("use")

    def done_with(self, lane: int) -> None:
        self.log.append("done")


class Gather:
    def allocate(self, size: tuple[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):  # type: ignore[no-untyped-def]
        return transfer._torch.all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


@pytest.mark.parametrize("comm", [None, "custom"])
@ranks(2)
def test_memory_that_a_gather_took_besides_the_whole_is_given_back_to_its_lane_in_order(comm: str | None) -> None:
    model = nn.Linear(8, 8)
    fully_shard(model)
    (group,) = find_state(model).groups
    group.streams = recorder = Recorder()
    if comm:
        model.set_custom_all_gather(Gather())
    model.unshard()
    model.reshard()
    assert recorder.log == ["gathered", "use", *(["done"] if comm else []), "done"]
