"""Reduce-scatters for gloo: the same gradients, nothing copied around them, gloo alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Odd, Tower, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale_fsdp import (
    ExchangeReduceScatter,
    InPlaceReduceScatter,
    MixedPrecisionPolicy,
    VescaleError,
    fully_shard,
    report,
    traffic,
)


def train(kind: type[nn.Module], comm: Any, shard: Callable[..., Any] = fully_shard, **options: Any) -> list[Any]:
    """The gradients of three steps, of which the second is held without synchronisation."""
    torch.manual_seed(0)
    model = kind()
    for block in getattr(model, "blocks", ()):
        shard(block, **options)
    shard(model, **options)
    for module in model.modules():
        if comm is not None and isinstance(module, TorchFSDPModule):
            module.set_custom_reduce_scatter(comm)
    grads = []
    for step in range(3):
        model.set_requires_gradient_sync(step != 1)  # type: ignore[operator]
        model(batch(step, dist.get_world_size(), dist.get_rank())).square().mean().backward()
        grads += [param.grad.to_local().clone() for param in model.parameters() if param.grad is not None]
    return grads


POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, reduced in fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16),
}


@pytest.mark.parametrize("policy", POLICIES)
@ranks(2, 3, 4)
def test_gradients_have_the_bits_of_gloos_own_reduce_scatter(policy: str) -> None:
    for kind in (Tower, Odd):
        for options in ({}, {"max_lanes": 3}):
            options = {"mp_policy": POLICIES[policy], **options}
            mine, theirs = train(kind, InPlaceReduceScatter(), **options), train(kind, None, **options)
            assert len(mine) == len(theirs) > 0
            assert all(map(torch.equal, mine, theirs))


@ranks(4)
def test_replicas_sum_the_same_bits() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mine, theirs = train(Tower, InPlaceReduceScatter(), mesh=mesh), train(Tower, None, mesh=mesh)
    assert all(map(torch.equal, mine, theirs))


@ranks(2)
def test_two_ranks_exchange_to_the_bits_of_gloos_own_reduce_scatter() -> None:
    for kind in (Tower, Odd):
        for policy in POLICIES.values():
            for options in ({"mp_policy": policy}, {"mp_policy": policy, "max_lanes": 3}):
                mine, theirs = train(kind, ExchangeReduceScatter(), **options), train(kind, None, **options)
                assert len(mine) == len(theirs) > 0
                assert all(map(torch.equal, mine, theirs))


@ranks(3, 4)
def test_more_ranks_exchange_to_the_same_sums_but_for_rounding() -> None:
    for kind in (Tower, Odd):
        for options in ({}, {"max_lanes": 3}):
            mine, theirs = train(kind, ExchangeReduceScatter(), **options), train(kind, None, **options)
            assert len(mine) == len(theirs) > 0
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=["sum", "average"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
@ranks(1, 4)
def test_an_exchange_adds_in_the_order_of_ranks(dtype: torch.dtype, op: Any) -> None:
    size = dist.get_world_size()
    inputs = [(8 * torch.randn(size * 5, generator=torch.Generator().manual_seed(i))).to(dtype) for i in range(size)]
    if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
        return
    output = torch.empty(5, dtype=dtype)
    mine = inputs[dist.get_rank()].clone()
    ExchangeReduceScatter()(output, mine, dist.group.WORLD, op)  # type: ignore[arg-type]
    wide = torch.float32 if dtype.is_floating_point else dtype
    expected = torch.zeros(5, dtype=wide)
    for each in inputs:
        expected += each.view(size, 5)[dist.get_rank()].to(wide)
    expected = expected.to(dtype)
    assert torch.equal(output, expected / size if op == dist.ReduceOp.AVG else expected)
    assert torch.equal(mine, inputs[dist.get_rank()])


@ranks(1)
def test_an_exchange_only_sums_and_averages() -> None:
    with pytest.raises(ValueError, match="expected a sum or an average, got"):
        ExchangeReduceScatter()(torch.zeros(4), torch.zeros(4), dist.group.WORLD, dist.ReduceOp.MAX)  # type: ignore[arg-type]


@ranks(2)
def test_the_buffer_of_an_exchange_is_in_the_report() -> None:
    model = Tower()
    fully_shard(model)
    before = report(model)
    model.set_custom_reduce_scatter(ExchangeReduceScatter())  # type: ignore[operator]
    (group,) = before.groups
    assert report(model).groups[0].peak_nbytes_bound == (group.peak_nbytes_bound or 0) + group.whole_nbytes


@pytest.mark.parametrize("kind", [InPlaceReduceScatter, ExchangeReduceScatter])
@ranks(2)
def test_torchs_fsdp2_takes_it(kind: Any) -> None:
    mine, theirs = (train(Tower, comm, torch_fully_shard) for comm in (kind(), None))
    assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("kind", [InPlaceReduceScatter, ExchangeReduceScatter])
@ranks(2)
def test_nothing_is_copied_around_it(kind: Any) -> None:
    copied = []
    for comm in (kind(), None):
        model = copy.deepcopy(Tower())
        fully_shard(model)
        if comm is not None:
            model.set_custom_reduce_scatter(comm)
        before = traffic(model)
        model(batch(0, 2, dist.get_rank())).square().mean().backward()
        copied.append((traffic(model) - before).copied_bytes)
    assert copied[0] == copied[1] == sum(param.numel() * 4 for param in model.parameters())


class Allocated:
    """Counts what `InPlaceReduceScatter` is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.comm = InPlaceReduceScatter()
        self.is_in_place = True

    def allocate(self, *size: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("an in-place collective was asked for memory")

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any) -> None:
        self.calls.append((input_tensor.untyped_storage().nbytes(), input_tensor.nbytes))
        self.comm(output_tensor, input_tensor, group, op)


@ranks(2)
def test_a_users_collective_that_says_is_in_place_gets_the_gradients_buffer_itself() -> None:
    model = Tower()
    fully_shard(model)
    comm: Any = Allocated()
    model.set_custom_reduce_scatter(comm)  # type: ignore[operator]
    model(batch(0, 2, dist.get_rank())).square().mean().backward()
    assert comm.calls == [(comm.calls[0][1],) * 2]
    assert comm.calls[0][1] >= 4 * sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("kind", [InPlaceReduceScatter, ExchangeReduceScatter])
@ranks(1)
def test_other_backends_and_asynchronous_calls_are_refused(kind: Any) -> None:
    group, comm = dist.group.WORLD, kind()
    assert group is not None
    with pytest.raises(NotImplementedError, match="async_op=True is not built"):
        comm(torch.zeros(4), torch.zeros(4), group, dist.ReduceOp.SUM, async_op=True)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    model = nn.Linear(4, 4)
    fully_shard(model)
    wanted = "expected a gloo process group, got fake over 4 ranks, whose own reduce-scatter is faster"
    with pytest.raises(VescaleError, match=re.escape(wanted)):
        model.set_custom_reduce_scatter(comm)  # type: ignore[operator]
    with pytest.raises(VescaleError, match=re.escape(wanted)):
        comm(torch.zeros(1), torch.zeros(4), dist.group.WORLD, dist.ReduceOp.SUM)  # type: ignore[arg-type]
