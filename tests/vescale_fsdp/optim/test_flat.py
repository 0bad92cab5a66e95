"""Optimizers on flat shards: the same bits as parameter by parameter, and the same state for everyone else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import ranks
from small_models import Odd, Tower, batch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from vescale_fsdp import ParamPolicy, clip_grad_norm_, fully_shard
from vescale_fsdp.errors import VescaleError
from vescale_fsdp.optim import flat, tiles
from vescale_fsdp.optim.strip import Strip

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "sgd foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "sgd fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "adam foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adamw tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    "adam with a large eps": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    "adagrad fused": (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "rmsprop foreach": (torch.optim.RMSprop, {"lr": 0.01, "foreach": True}),
}


NUMEL = tiles.NUMEL


def wrapped(kind: Callable[[], nn.Module] = Tower) -> nn.Module:
    torch.manual_seed(0)
    model = kind()
    for block in getattr(model, "blocks", ()):
        fully_shard(block)
    fully_shard(model)
    return model


def pair(name: str, kind: Callable[[], nn.Module] = Tower) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """The same model twice, with the optimizer on flat shards and as it is."""
    optimizer, settings = OPTIMIZERS[name]
    models = [wrapped(kind), wrapped(kind)]
    optims = [optimizer(model.parameters(), **copy.deepcopy(settings)) for model in models]
    return [(models[0], flat(optims[0], models[0])), (models[1], optims[1])]


def backward(model: nn.Module, step: int) -> None:
    x = batch(step, dist.get_world_size(), dist.get_rank())
    model(x).square().mean().backward()


def local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_equal(trained: list[tuple[nn.Module, torch.optim.Optimizer]]) -> None:
    """Parameters and every state: bits, names, placements."""
    (ours, mine), (theirs, other) = trained
    for (name, one), two in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(local(one), local(two)), name
        assert list(mine.state.get(one, {})) == list(other.state.get(two, {})), name
        for key, value in other.state.get(two, {}).items():
            found = mine.state[one][key]
            assert type(found) is type(value), (name, key)
            assert getattr(found, "placements", None) == getattr(value, "placements", None), (name, key)
            assert (found.shape, found.dtype) == (value.shape, value.dtype), (name, key)
            assert torch.equal(local(found), local(value)), (name, key)


@pytest.mark.parametrize("kind", [Tower, Odd])
@ranks(1, 2, 3, 4)
def test_every_bit_is_that_of_the_optimizers_own_step(kind: type[nn.Module]) -> None:
    for name in OPTIMIZERS:
        trained = pair(name, kind)
        for step in range(3):
            for model, optim in trained:
                backward(model, step)
                optim.step()
                optim.zero_grad()
        assert_equal(trained)


@ranks(1, 3)
def test_tiles_of_a_segment_get_the_same_bits_as_the_whole() -> None:
    tiles.NUMEL = 7
    try:
        for name in OPTIMIZERS:
            trained = pair(name, Odd)
            for step in range(4):
                for model, optim in trained:
                    backward(model, step)
                    optim.step()
                    optim.zero_grad()
            assert_equal(trained)
            batches = trained[0][1]._flattened._batches
            if name != "sgd" and "fused" not in name:  # one pass over memory; kernels that cannot be cut
                assert all(param.numel() <= 7 for batch in batches for param in batch.params), name
    finally:
        tiles.NUMEL = NUMEL


@ranks(2)
def test_a_step_like_the_last_one_does_not_look_at_parameters_one_by_one() -> None:
    (model, optim), _ = pair("adamw")
    looked: list[Strip] = []
    scan = Strip._scan
    Strip._scan = lambda strip, joins: (looked.append(strip), scan(strip, joins))[1]  # type: ignore[method-assign]
    try:
        for step in range(4):
            backward(model, step)
            if step == 3:
                model.head.weight.grad = model.head.weight.grad.clone()
            looked.clear()
            optim.step()
            optim.zero_grad()
            assert len(looked) == {0: 3, 1: 0, 2: 0, 3: 1}[step], step
    finally:
        Strip._scan = scan  # type: ignore[method-assign]


@ranks(2)
def test_gradients_that_moved_and_states_that_were_replaced_change_no_bit() -> None:
    trained = pair("adamw")
    for step in range(6):
        for model, optim in trained:
            backward(model, step)
            weight = model.head.weight
            if step == 2:
                weight.grad = DTensor(weight.grad.to_local().clone(), weight._spec, requires_grad=False)
            if step == 5:
                lay_out_backwards([param for param in model.parameters() if param.grad.to_local().numel()])
            if step == 3:
                optim.state[weight]["exp_avg"] = optim.state[weight]["exp_avg"].clone() * 2
            if step == 4:
                optim.state[weight] = {key: value.clone() for key, value in optim.state[weight].items()}
            optim.step()
            optim.zero_grad()
    assert_equal(trained)


def lay_out_backwards(params: list[Any]) -> None:
    """Put the gradients into one buffer, the last first."""
    buffer = torch.empty(sum(param.grad.to_local().numel() for param in params))
    for param, part in zip(
        reversed(params), buffer.split([p.grad.to_local().numel() for p in reversed(params)]), strict=True
    ):
        local = part.view(param.grad.to_local().shape).copy_(param.grad.to_local())
        param.grad = DTensor(local, param._spec, requires_grad=False)


@ranks(2, 4)
def test_a_group_is_one_segment_and_its_padding_stays_zero() -> None:
    (model, optim), _ = pair("adamw", Odd)
    for step in range(2):
        backward(model, step)
        optim.step()
        optim.zero_grad()
    (strip,) = optim._flattened._strips
    assert len(strip.segments) == 1
    held = sum(local(param).numel() for param in model.parameters())
    assert strip.flat.count_nonzero() <= held
    buffer = fully_shard_buffer(model)
    assert all(not buffer.flat[gap.begin : gap.end].any() for gap in buffer.gaps())


def fully_shard_buffer(model: nn.Module) -> Any:
    from vescale_fsdp.state import find_state

    (group,) = find_state(model).groups
    return group.shards.buffer


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@ranks(2)
def test_low_precision_parameters_get_the_same_bits(low: torch.dtype) -> None:
    trained = pair("adam with a large eps", lambda: Tower().to(low))
    for step in range(2):
        for model, optim in trained:
            model(batch(step, 2, dist.get_rank()).to(low)).square().mean().backward()
            optim.step()
            optim.zero_grad()
    assert_equal(trained)


@pytest.mark.parametrize("name", ["sgd momentum", "adamw", "adagrad", "rmsprop"])
@ranks(2)
def test_groups_frozen_parameters_and_missing_gradients_change_no_bit(name: str) -> None:
    optimizer, settings = OPTIMIZERS[name]
    trained = []
    for is_flat in (True, False):
        model = wrapped()
        model.head.bias.requires_grad_(False)
        decayed = [param for param in model.parameters() if param.ndim > 1]
        rest = [param for param in model.parameters() if param.ndim < 2]
        optim = optimizer([{"params": decayed}, {"params": rest, "weight_decay": 0.0, "lr": 0.2}], **settings)
        trained.append((model, flat(optim, model) if is_flat else optim))
    for step in range(4):
        for model, optim in trained:
            backward(model, step)
            if step in (0, 2):
                model.blocks[step // 2].up.weight.grad = None
            optim.step()
            optim.zero_grad()
    assert_equal(trained)


@pytest.mark.parametrize("set_to_none", [True, False])
@ranks(2)
def test_accumulation_clipping_and_both_zero_grads_change_no_bit(set_to_none: bool) -> None:
    trained = pair("adamw")
    norms = []
    for step in range(3):
        for model, optim in trained:
            backward(model, 2 * step)
            backward(model, 2 * step + 1)
            norms.append(clip_grad_norm_(model.parameters(), 0.1))
            optim.step()
            optim.zero_grad(set_to_none=set_to_none)
    assert norms[0::2] == norms[1::2]
    assert_equal(trained)


@ranks(2)
def test_schedulers_hooks_and_closures_work_as_before() -> None:
    trained = pair("adamw")
    calls: list[str] = []
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 / (step + 1)) for _, optim in trained]
    trained[0][1].register_step_pre_hook(lambda *_: calls.append("before"))
    trained[0][1].register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(3):
        losses = []
        for (model, optim), scheduler in zip(trained, schedulers, strict=True):

            def closure(model: nn.Module = model, optim: Any = optim, step: int = step) -> Tensor:
                optim.zero_grad()
                loss = model(batch(step, 2, dist.get_rank())).square().mean()
                loss.backward()
                return loss

            losses.append(optim.step(closure))
            scheduler.step()
        assert torch.equal(*losses)
    assert calls == ["before", "after"] * 3
    assert_equal(trained)


@pytest.mark.parametrize("name", ["adamw", "adamw fused"])
@ranks(2)
def test_a_grad_scaler_skips_and_unscales_as_before(name: str) -> None:
    trained = pair(name)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in trained]
    for step in range(4):
        for (model, optim), scaler in zip(trained, scalers, strict=True):
            loss = model(batch(step, 2, dist.get_rank())).square().mean()
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
    assert_equal(trained)


@pytest.mark.parametrize("name", ["sgd momentum", "adamw", "adamw fused", "adagrad", "rmsprop"])
@ranks(1, 2)
def test_state_dicts_move_between_flat_and_usual_steps(name: str) -> None:
    trained = pair(name)
    for step in range(2):
        for model, optim in trained:
            backward(model, step)
            optim.step()
            optim.zero_grad()
    exchanged = pair(name)
    for (source, optim), (target, other) in zip(trained, reversed(exchanged), strict=True):
        target.load_state_dict(source.state_dict())
        other.load_state_dict(copy.deepcopy(optim.state_dict()))
    assert_equal(exchanged)
    for step in range(2, 4):
        for model, optim in (*trained, *exchanged):
            backward(model, step)
            optim.step()
            optim.zero_grad()
    assert_equal(trained)
    assert_equal(exchanged)
    assert_equal([trained[0], exchanged[1]])


@pytest.mark.parametrize("source", [0, 1])
@ranks(2)
def test_checkpoints_of_either_load_into_the_other(source: int) -> None:
    import tempfile
    from pathlib import Path

    trained, fresh = pair("adamw"), pair("adamw")
    for step in range(3):
        for model, optim in trained:
            backward(model, step)
            if step == 1:
                model.embed.weight.grad = None  # so that `step` differs between parameters
            optim.step()
            optim.zero_grad()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = Path(str(folder[0]))
    dcp.save(get_optimizer_state_dict(*trained[source]), checkpoint_id=path)
    for model, optim in fresh:
        model.load_state_dict(trained[source][0].state_dict())
        state = get_optimizer_state_dict(model, optim)
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(model, optim, state)
    assert_equal(fresh)
    assert_equal([fresh[0], trained[1]])
    for model, optim in (*trained, *fresh):
        backward(model, 5)
        optim.step()
    assert_equal([fresh[0], trained[1]])


@ranks(2)
def test_a_step_number_written_in_place_counts() -> None:
    trained = pair("adamw")
    for step in range(3):
        for model, optim in trained:
            backward(model, step)
            optim.step()
            optim.zero_grad()
            if step == 1:
                optim.state[model.embed.weight]["step"].fill_(7.0)
    assert_equal(trained)


@ranks(2)
def test_states_are_views_of_one_buffer_a_group() -> None:
    (model, optim), _ = pair("adamw")
    backward(model, 0)
    optim.step()
    for module in (model.blocks[0], model.blocks[1]):
        for key in ("exp_avg", "exp_avg_sq"):
            storages = {optim.state[p][key].to_local().untyped_storage().data_ptr() for p in module.parameters()}
            assert len(storages) == 1


@ranks(2)
def test_added_groups_foreign_parameters_and_converted_models_are_stepped() -> None:
    trained, owned = [], []
    for is_flat in (True, False):
        model, own = wrapped(), nn.Parameter(torch.ones(3))
        optim: torch.optim.Optimizer = torch.optim.Adam([*model.blocks.parameters(), own], lr=0.01)
        optim = flat(optim, model) if is_flat else optim
        optim.add_param_group({"params": [*model.embed.parameters(), *model.head.parameters()], "lr": 0.1})
        trained.append((model, optim))
        owned.append(own)
    for dtype in (torch.float32, torch.float64):
        for (model, optim), own in zip(trained, owned, strict=True):
            if dtype == torch.float64:
                model.to(dtype)
                optim.state.clear()
            (model(batch(0, 2, dist.get_rank()).to(dtype)).square().mean() + own.square().sum()).backward()
            optim.step()
            optim.zero_grad()
    assert_equal(trained)
    assert torch.equal(*owned)


@ranks(2)
def test_parameters_that_change_their_group_or_leave_it_are_stepped_as_their_group_says() -> None:
    trained = pair("sgd momentum")
    for model, optim in trained:
        optim.add_param_group({"params": list(model.head.parameters())[:0], "lr": 0.001})
    for number in range(3):
        for model, optim in trained:
            backward(model, number)
            if number == 1:  # by assignment, as torch allows: nothing is called
                params = optim.param_groups[0]["params"]
                optim.param_groups[0]["params"], optim.param_groups[1]["params"] = params[4:], params[:3]
            if number == 2:
                del optim.param_groups[0]["params"][0]
            optim.step()
            optim.zero_grad()
    assert_equal(trained)


@ranks(1)
def test_what_flat_does_not_know_is_refused() -> None:
    model = wrapped()
    with pytest.raises(
        ValueError, match=r"expected one of torch.optim's SGD, Adam, AdamW, Adagrad, RMSprop, got LBFGS"
    ):
        flat(torch.optim.LBFGS(model.parameters()), model)
    with pytest.raises(ValueError, match=r"differentiable=True needs the optimizer's own step"):
        flat(torch.optim.SGD(model.parameters(), differentiable=True), model)
    with pytest.raises(ValueError, match=r"holds no module that vescale_fsdp.fully_shard wrapped"):
        flat(torch.optim.SGD(model.parameters()), nn.Linear(2, 2))
    scheduled = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    with pytest.raises(ValueError, match=r"Call flat\(\) before you make that"):
        flat(scheduled, model)
    with pytest.raises(VescaleError, match="was copied or unpickled"):
        copy.copy(flat(torch.optim.SGD(model.parameters(), lr=0.1), model)).step()


class Pieces(nn.Module):
    """Whole tensors and cut ones: on three ranks, each holds other pieces, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((rows, 5), float(rows)) for rows in (3, 40, 3, 41, 40, 40, 7))

    def forward(self, x: Tensor) -> Tensor:
        return sum((weight.square().sum() for weight in self.weights), x.sum())


def policy(fqn: str, param: nn.Parameter) -> ParamPolicy:
    return ParamPolicy(granularity={3: "whole", 40: "rows:20", 41: "rows:1", 7: "rows:7"}[param.shape[0]])


@ranks(3, 4)
def test_states_stand_in_the_optimizers_order_on_every_rank() -> None:
    orders = []
    for is_flat in (True, False):
        model = Pieces()
        fully_shard(model, param_policy=policy, max_lanes=1)
        optim: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        optim = flat(optim, model) if is_flat else optim
        model(torch.ones(1)).backward()
        optim.step()
        names = {param: name for name, param in model.named_parameters()}
        orders.append([names[param] for param in optim.state])
        values = get_optimizer_state_dict(model, optim, options=StateDictOptions(full_state_dict=True))
        assert values["state"].keys() == set(names.values())
    assert orders[0] == orders[1] == list(names.values())


@ranks(2)
def test_states_of_a_group_that_is_added_begin_as_the_optimizers_defaults_say() -> None:
    weights = []
    for is_flat in (True, False):
        model = wrapped()
        first, *others = model.parameters()
        optim: torch.optim.Optimizer = torch.optim.Adagrad([first], lr=0.1, initial_accumulator_value=0.1)
        optim = flat(optim, model) if is_flat else optim
        optim.add_param_group({"params": others})
        model(batch(0, 2, dist.get_rank())).square().mean().backward()
        optim.step()
        weights.append([param.to_local() for param in others])  # type: ignore[attr-defined]
    assert all(map(torch.equal, *weights))
