"""Reports from the field, each as the smallest model that shows it: tied rows, optimizers, averages, offload, init."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Odd, Tower, batch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vescale_fsdp import ShardedEMA, fully_shard


def wrapped(model: nn.Module, **kwargs: object) -> nn.Module:
    for block in getattr(model, "blocks", ()):
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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


@pytest.mark.parametrize("model_type", [Odd, Tower])
@ranks(2)
def test_averages_of_shards_equal_averages_of_full_weights(model_type: type[nn.Module]) -> None:
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
