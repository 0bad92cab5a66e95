"""Averages load what was saved of them under another cut, or whole, and refuse what does not fit by name."""

from __future__ import annotations

import pytest
import torch
from ranks import ranks
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from vescale_fsdp import ParamPolicy, ShardedEMA, VescaleError, fully_shard


def plain(seed: int, out: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 7), nn.Linear(7, out))


def assert_averages(ema: ShardedEMA, expected: nn.Module) -> None:
    for name, average in ema.state_dict().items():
        assert isinstance(average, DTensor)
        assert torch.equal(average.full_tensor(), expected.get_parameter(name)), name


@ranks(3)
def test_whole_tensors_and_tensors_of_another_cut_are_loaded_into_shards() -> None:
    ema = ShardedEMA(fully_shard(plain(1)))
    ema.load_state_dict(plain(2).state_dict())
    assert_averages(ema, plain(2))
    by_rows = fully_shard(plain(3), param_policy=lambda fqn, param: ParamPolicy(granularity="rows:3"))
    ema.load_state_dict(ShardedEMA(by_rows).state_dict())
    assert_averages(ema, plain(3))
    ema.load_state_dict(fsdp2(plain(4)).state_dict())
    assert_averages(ema, plain(4))


@ranks(2)
def test_averages_of_another_shape_or_name_are_named_and_nothing_changes() -> None:
    ema = ShardedEMA(fully_shard(plain(1)))
    with pytest.raises(VescaleError, match=r"1.weight: expected shape \(5, 7\), the state dict has \(6, 7\)"):
        ema.load_state_dict(plain(2, out=6).state_dict())
    with pytest.raises(VescaleError, match=r"differ in \['1.bias'\]"):
        ema.load_state_dict({key: value for key, value in plain(2).state_dict().items() if key != "1.bias"})
    assert_averages(ema, plain(1))
