"""Reports from the field, each as the smallest model that shows it: tied rows, optimizers, averages, offload, init."""

from __future__ import annotations

import copy
import io
import pickle
import zlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Odd, Tower, batch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from wrapping import full, wrapped

from ragged_dtensor import init_full
from vescale_fsdp import CPUOffloadPolicy, ParamPolicy, ShardedEMA, clip_grad_norm_, fully_shard
from vescale_fsdp.state import find_state


class TiedRows(nn.Module):
    """Five rows, which two ranks share 3 and 2, used as embedding and as output layer (pytorch#176076)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


@ranks(2, 3)
def test_every_row_of_an_uneven_tied_weight_trains_like_the_reference() -> None:
    reference = TiedRows()
    model = wrapped(copy.deepcopy(reference))
    start = reference.embed.weight.detach().clone()
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        tokens = torch.randint(0, 5, (num_ranks, 6), generator=torch.Generator().manual_seed(step))
        for each, optim, part in zip((model, reference), optims, (tokens[rank : rank + 1], tokens), strict=True):
            nn.functional.cross_entropy(each(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()).backward()
            optim.step()
            optim.zero_grad()
    trained = full(model.embed.weight)
    for row in range(5):
        torch.testing.assert_close(trained[row], reference.embed.weight.detach()[row])
        assert not torch.equal(trained[row], start[row])


@pytest.mark.parametrize("shard", [fully_shard, torch_fully_shard], ids=["ours", "torch"])
@ranks(2, 3)
def test_state_dicts_and_optimizers_are_copied_pickled_and_saved(shard: Callable[..., nn.Module]) -> None:
    model = Tower()
    shard(model)
    optim = torch.optim.AdamW(model.parameters())
    model(batch(0, 2)).square().mean().backward()
    optim.step()
    if shard is torch_fully_shard:
        model.zero_grad()  # deepcopy fails at gradients that begin inside a buffer
    state = {"model": model.state_dict(), "optim": optim.state_dict()}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    twins = [copy.deepcopy(state), pickle.loads(pickle.dumps(state)), torch.load(file, weights_only=True)]
    twins.append({"model": copy.deepcopy(dict(model.named_parameters())), "optim": copy.deepcopy(optim).state_dict()})
    expected = {name: full(value).clone() for name, value in state["model"].items()}
    moments = [full(each["exp_avg"]).clone() for each in state["optim"]["state"].values()]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
            optim.state[param]["exp_avg"].zero_()
    for twin in twins:
        assert twin["model"].keys() == expected.keys()
        for name, value in twin["model"].items():
            assert value.placements == state["model"][name].placements
            assert torch.equal(full(value), expected[name])
        for moment, each in zip(moments, twin["optim"]["state"].values(), strict=True):
            assert torch.equal(full(each["exp_avg"]), moment)


@pytest.mark.parametrize("foreach", [True, None])
@ranks(2)
def test_ignored_and_sharded_parameters_step_in_one_foreach_optimizer(foreach: bool | None) -> None:
    models = []
    source = nn.Linear(4, 4)  # pytorch#183207
    for setting in (foreach, False):
        model = copy.deepcopy(source)
        fully_shard(model, ignored_params=[model.bias])
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=setting)
        for step in range(3):
            model(batch(step, 1, width=4)).square().mean().backward()
            optim.step()
            optim.zero_grad()
        models.append(model)
    assert torch.equal(models[0].bias, models[1].bias)
    assert torch.equal(full(models[0].weight), full(models[1].weight))


@ranks(2)
def test_fused_adamw_equals_unfused() -> None:
    source, models = Odd(), []
    for fused in (True, False):
        model = wrapped(copy.deepcopy(source))
        optim = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused, foreach=False)
        for step in range(3):
            model(batch(step, 2, dist.get_rank())).square().mean().backward()
            with CommDebugMode() as mode:
                optim.step()
            assert mode.get_total_counts() == 0
            optim.zero_grad()
        models.append(model)
    for fused_param, param in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(full(fused_param), full(param), rtol=1e-5, atol=1e-6)


@ranks(3)
def test_the_clipped_norm_is_the_same_plain_number_on_every_rank() -> None:
    model = wrapped(Odd())
    model(batch(0, 3, dist.get_rank())).square().mean().backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    assert type(norm) is torch.Tensor
    seen: list[float] = [0.0] * 3
    dist.all_gather_object(seen, norm.item())
    assert len(set(seen)) == 1
    theirs = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert full(theirs).item() == pytest.approx(min(1.0, seen[0]), rel=1e-5)


def five_rows() -> nn.Module:
    return nn.Linear(8, 5)


@pytest.mark.parametrize("model_type", [Odd, five_rows])
@ranks(2)
def test_averages_of_shards_equal_averages_of_full_weights(model_type: Callable[[], nn.Module]) -> None:
    reference = model_type()
    model = wrapped(copy.deepcopy(reference))
    ema, expected = ShardedEMA(model, 0.9), AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    expected.update_parameters(reference)  # torch's first update copies
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(batch(step, 2, dist.get_rank())).square().mean().backward()
        optim.step()
        optim.zero_grad()
        with CommDebugMode() as mode:
            ema.update()
        assert mode.get_total_counts() == 0
        with torch.no_grad():
            for param, sharded in zip(reference.parameters(), model.parameters(), strict=True):
                param.copy_(full(sharded))
        expected.update_parameters(reference)
    for name, param in expected.module.named_parameters():
        assert torch.equal(full(ema.state_dict()[name]), param)
    with ema.swapped(), torch.no_grad():
        assert torch.equal(model(batch(9, 1)), expected(batch(9, 1)))
    for param, sharded in zip(reference.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(sharded), param)
    other = ShardedEMA(model, 0.9)
    other.load_state_dict(ema.state_dict())
    assert all(torch.equal(full(value), full(ema.state_dict()[name])) for name, value in other.state_dict().items())


@ranks(4)
def test_a_second_forward_after_resharding_to_two_ranks_allocates_nothing_more() -> None:
    model = wrapped(Tower(), reshard_after_forward=2)  # pytorch#147179
    groups = [group for state in (find_state(model), *map(find_state, model.blocks)) for group in state.groups]
    held = []
    for _ in range(3):
        with torch.no_grad():
            model(batch(0, 4, dist.get_rank()))
        whole = sum(group._whole.flat.untyped_storage().nbytes() for group in groups)
        kept = sum(group._kept.buffer.flat.untyped_storage().nbytes() for group in groups if group._kept is not None)
        held.append((whole, kept, sum(group.is_unsharded for group in groups)))
    assert held[0][0] == 0
    assert held[0][1] > 0
    assert held[1:] == held[:1] * 2


@ranks(2)
def test_offloaded_models_give_and_take_state_dicts_also_after_being_moved() -> None:
    """C51: they work, or say which parameters stay on the CPU."""
    model = wrapped(Tower(), offload_policy=CPUOffloadPolicy())
    before = {name: full(value).clone() for name, value in model.state_dict().items()}
    model.to("cpu")
    model(batch(0, 2, dist.get_rank())).square().mean().backward()
    state = model.state_dict()
    assert all(value.device.type == "cpu" and torch.equal(full(value), before[name]) for name, value in state.items())
    model.load_state_dict({name: value * 2 for name, value in state.items()})
    assert all(torch.equal(full(value), 2 * before[name]) for name, value in model.state_dict().items())
    away = wrapped(Tower(), offload_policy=CPUOffloadPolicy()).to("meta")
    assert away.state_dict().keys() == before.keys()
    with pytest.raises(RuntimeError, match=r"embed\.weight"):
        away(batch(0, 2))


def init_by_name(model: nn.Module) -> None:
    """One seed per name, so that a parameter's values depend neither on the others nor on who holds them."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            torch.manual_seed(zlib.crc32(name.encode()))
            if "up.weight" in name:
                init_full(param, nn.init.orthogonal_)
            elif "down" in name:
                nn.init.trunc_normal_(param, std=0.02)
            elif param.ndim > 1:
                nn.init.kaiming_uniform_(param)
            else:
                nn.init.normal_(param)


@pytest.mark.parametrize("model_type", [Odd, Tower])
@ranks(1, 2, 3)
def test_initialising_by_name_after_sharding_equals_initialising_before(model_type: type[nn.Module]) -> None:
    reference = model_type()
    init_by_name(reference)
    with torch.device("meta"):
        model = model_type()
    wrapped(model).to_empty(device="cpu")
    init_by_name(model)
    for (name, sharded), param in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(sharded), param), name
    assert torch.equal(model(batch(0, 2)).detach(), reference(batch(0, 2)).detach())


@ranks(2)
def test_a_rank_without_elements_is_materialised_from_meta_with_the_right_shape() -> None:
    model = nn.Module()  # pytorch#164554
    model.register_parameter("weight", nn.Parameter(torch.empty(1, 3, 4, device="meta")))
    model.forward = lambda x: model.weight * x  # type: ignore[method-assign]
    fully_shard(model, param_policy=lambda fqn, param: ParamPolicy(granularity="whole"))
    model.to_empty(device="cpu")
    local = model.weight.to_local()
    assert tuple(local.shape) == ((1, 3, 4) if dist.get_rank() == 0 else (0, 3, 4))
    assert local.device.type == model.weight.device.type == "cpu"
    nn.init.ones_(model.weight)
    assert torch.equal(full(model.weight.detach()), torch.ones(1, 3, 4))


@pytest.mark.parametrize("outside", [True, False])
@ranks(2)
def test_two_forwards_of_checkpointed_blocks_before_one_backward_equal_the_reference(outside: bool) -> None:
    reference = Tower()  # pytorch#153354, as DPO trains
    model = copy.deepcopy(reference)
    for index, block in enumerate(model.blocks):
        if outside:
            model.blocks[index] = checkpoint_wrapper(fully_shard(block))
        else:
            model.blocks[index] = fully_shard(checkpoint_wrapper(block))
    fully_shard(model)
    for each, rank in ((model, dist.get_rank()), (reference, None)):
        first, second = each(batch(0, 2, rank)), each(batch(1, 2, rank))
        (first.square() + second.pow(3)).mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), theirs.grad)


@ranks(2)
def test_no_offload_policy_is_no_offload_as_under_fsdp2() -> None:
    for shard in (fully_shard, torch_fully_shard):
        model = nn.Linear(4, 4)
        shard(model, offload_policy=None)
        model(batch(0, 1, width=4)).sum().backward()
        assert model.weight.grad is not None
