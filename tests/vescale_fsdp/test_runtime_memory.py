"""What a step holds and moves: the reported peaks against measured ones, and never more than FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt_models import GPT, SHAPES, Shape
from live_bytes import LiveBytes, live_now, measure
from ranks import ranks
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from vescale_fsdp import MixedPrecisionPolicy, fully_shard, report


def wrapped(model: nn.Module, shard: Callable[..., object] = fully_shard, **kwargs: Any) -> nn.Module:
    for block in model.blocks:
        shard(block, **kwargs)
    shard(model, **kwargs)
    return model


def shard_nbytes(model: nn.Module) -> int:
    """Storages of this rank's shards, padding included."""
    local = [param._local_tensor if isinstance(param, DTensor) else param for param in model.parameters()]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in local}.values())


def measure_step(model: nn.Module, step: int = 1) -> tuple[int, LiveBytes]:
    """Peak bytes of a step without gradients at its start, shards included, and what it moved."""
    model.zero_grad()
    before = live_now()
    meter = measure(lambda: model.loss(step, dist.get_rank()).backward())
    return meter.peak - before + shard_nbytes(model), meter


def activation_nbytes(shape: Shape) -> int:
    """What autograd saves in a forward without sharding, apart from parameters; as much again passes by in backward."""
    model = GPT(shape)
    params = {param.untyped_storage()._cdata for param in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in params:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.loss(0, 0)
    return 2 * sum(each.untyped_storage().nbytes() for each in saved.values())


WIDE = Shape(layers=3, width=256, heads=2, hidden=1024, vocabulary=64, length=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "freed": {"reshard_after_forward": True},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "bfloat16_alone": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
}


@pytest.mark.parametrize("setting", SETTINGS)
@ranks(1, 2)
def test_the_reported_peak_is_measured_within_five_percent_and_its_bound_holds(setting: str) -> None:
    model = wrapped(GPT(WIDE), **SETTINGS[setting])
    expected = report(model)  # before anything ran
    model.loss(0, dist.get_rank()).backward()
    measured, _ = measure_step(model)
    assert report(model).peak_nbytes == expected.peak_nbytes
    assert measured == pytest.approx(expected.peak_nbytes, rel=0.05)
    assert measured <= expected.peak_nbytes_bound + activation_nbytes(WIDE)
    assert max(group.peak_nbytes_bound for group in expected.groups) <= expected.peak_nbytes_bound
