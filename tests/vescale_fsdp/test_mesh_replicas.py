"""HSDP: replicas stay equal bit by bit, start equal or say so, and reduce over their axis only when told to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Tower, batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from vescale_fsdp import MixedPrecisionPolicy, broadcast_replicas, fully_shard, report, traffic
from vescale_fsdp.preflight import DivergenceError
from vescale_fsdp.replicas import digest


def hsdp(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes or (2, 2), mesh_dim_names=("rep", "shard"))


def wrap(model: nn.Module, shard: Any = fully_shard, **kwargs: Any) -> Any:
    for block in model.blocks:
        shard(block, **kwargs)
    return shard(model, **kwargs)


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor()


def local_bytes(model: nn.Module) -> list[int]:
    locals_ = [param.to_local() for param in model.parameters() if isinstance(param, DTensor)]
    return torch.cat([local.reshape(-1) for local in locals_]).view(torch.uint8).tolist()


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1), (1, 4)])
@ranks(4)
def test_replicas_are_equal_bit_by_bit_after_a_step(sizes: tuple[int, int]) -> None:
    mesh = hsdp(*sizes)
    model = wrap(Tower(), mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        model(batch(step, 4, dist.get_rank())).square().mean().backward()
        optim.step()
        optim.zero_grad()
    mine = local_bytes(model)
    others: list[Any] = [None] * mesh.size(0)
    dist.all_gather_object(others, mine, group=mesh.get_group("rep"))
    assert others == [mine] * mesh.size(0)


@pytest.mark.parametrize("reshard", [True, False, 2])
@ranks(8)
def test_collectives_under_hsdp_equal_fsdp2_number_by_number(reshard: bool | int) -> None:
    mesh = hsdp(2, 4)
    counts = []
    for shard in (fully_shard, torch_fully_shard):
        model = wrap(Tower(), shard, mesh=mesh, reshard_after_forward=reshard)
        model(batch(0, 8, dist.get_rank())).sum().backward()
        with CommDebugMode() as mode:
            model(batch(1, 8, dist.get_rank())).sum().backward()
        counts.append({name.__name__: count for name, count in mode.get_comm_counts().items() if count})
    assert counts[0] == counts[1]


@ranks(4)
def test_each_group_takes_one_reduce_scatter_and_one_all_reduce_of_what_its_plan_says() -> None:
    model = wrap(Tower(), mesh=hsdp())
    model(batch(0, 4, dist.get_rank())).sum()
    model.reshard()
    before = traffic(model)
    model(batch(0, 4, dist.get_rank())).sum().backward()
    moved = traffic(model) - before
    plans = [group.plan for group in report(model).groups]
    shares = sum(plan.share for plan in plans) * 4
    assert (moved.reduces, moved.all_reduces) == (3, 3)
    assert moved.reduced_bytes == 2 * shares
    # The root is gathered once, the two blocks twice. Received: from the one other shard, and from the other
    # replica as much as a ring all-reduce of two ranks takes.
    gathered = moved.gathers and sum(2 * plan.share * 4 * (1 if plan.name == "root" else 2) for plan in plans)
    assert moved.gathered_bytes == gathered
    assert moved.wire_bytes == gathered // 2 + shares + shares


@ranks(4)
def test_deferred_all_reduce_costs_one_all_reduce_and_one_reduce_scatter_per_micro_batch() -> None:
    reference = Tower()
    model = wrap(copy.deepcopy(reference), mesh=hsdp())
    before = traffic(model)
    for step in range(4):
        model.set_requires_all_reduce(step == 3)
        model(batch(step, 4, dist.get_rank())).square().mean().backward()
        reference(batch(step, 4)).square().mean().backward()
    moved = traffic(model) - before
    assert (moved.reduces, moved.all_reduces) == (4 * 3, 3)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), theirs.grad)
    model.set_requires_all_reduce(True)
    before = traffic(model)
    model(batch(4, 4, dist.get_rank())).square().mean().backward()
    assert (traffic(model) - before).all_reduces == 3


@ranks(4)
def test_without_gradient_sync_hsdp_communicates_nothing_until_the_last_micro_batch() -> None:
    reference = Tower()
    model = wrap(copy.deepcopy(reference), mesh=hsdp())
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        before = traffic(model)
        model(batch(step, 4, dist.get_rank())).square().mean().backward()
        reference(batch(step, 4)).square().mean().backward()
        moved = traffic(model) - before
        assert (moved.reduces, moved.all_reduces) == ((3, 3) if step == 2 else (0, 0))
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), theirs.grad)


class LateUse(nn.Module):
    """Its second layer is used on request alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.late = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, late: bool) -> torch.Tensor:
        x = self.first(x)
        return self.late(x) if late else x


@pytest.mark.parametrize("defer", ["all-reduce", "both", "nothing"])
@ranks(4)
def test_micro_batches_in_bfloat16_add_up_in_float32_whatever_is_deferred(defer: str) -> None:
    """Also for a parameter that is first used in the last of them, where FSDP2 fails without synchronisation."""
    reference = LateUse()
    model: Any = copy.deepcopy(reference)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=hsdp(), mp_policy=policy)
    model.set_reshard_after_backward(False)
    for step in range(3):
        last = step == 2
        model.set_is_last_backward(last)
        if defer == "all-reduce":
            model.set_requires_all_reduce(last)
        elif defer == "both":
            model.set_requires_gradient_sync(last)
        model(batch(step, 4, dist.get_rank()), late=last).float().square().mean().backward()
        reference(batch(step, 4), late=last).square().mean().backward()
    model.reshard()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(full(mine.grad), theirs.grad, rtol=3e-2, atol=3e-2)


class TwoKinds(Tower):
    """Its first block computes in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(x).double()).float()
        return self.head(self.blocks[1](x))


@ranks(4)
def test_custom_collectives_and_the_hook_after_the_all_reduce_work_with_several_groups_under_hsdp() -> None:
    reference = TwoKinds()
    model: Any = copy.deepcopy(reference)
    mesh = hsdp()
    fully_shard(model, mesh=mesh)
    seen: list[int] = []

    def hook(flat: torch.Tensor) -> None:
        seen.append(flat.numel())
        everyone = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(everyone, flat, group=mesh.get_group("rep"))
        assert torch.equal(*everyone)  # summed over replicas already
        flat.mul_(2)

    gather, reduce = _Gather(), _Reduce()
    model.set_all_reduce_hook(hook)
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    for each, rank in ((reference, None), (model, dist.get_rank())):
        each(batch(0, 4, rank)).square().mean().backward()
    assert sorted(seen) == sorted(group.plan.share for group in report(model).groups)
    assert (gather.calls, reduce.calls) == (2, 2)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), 2 * theirs.grad)


class _Gather:
    calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class _Reduce(_Gather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)])
@ranks(8)
def test_replicas_that_start_different_raise_on_every_rank_and_can_be_made_equal(sizes: tuple[int, ...]) -> None:
    rest = 8 // (sizes[0] * sizes[1] * sizes[2])
    root = init_device_mesh("cpu", (rest, *sizes), mesh_dim_names=("pp", "rep", "shard", "tp"))
    model = Tower()
    if sizes[2] > 1:
        parallelize_module(model, root["tp"], {"head": ColwiseParallel()})
    wrap(model, mesh=root["rep", "shard"])
    with torch.no_grad():
        if root.get_local_rank("rep") == 1 and root.get_local_rank("tp") == 0:
            model.head.bias.to_local().add_(1e-7)
        if root.get_local_rank("rep") == 1 and root.get_local_rank("shard") == 0:
            model.blocks[1].up.weight.to_local().mul_(2)
    with pytest.raises(DivergenceError, match=r"replicas start from different weights.*broadcast_replicas") as error:
        model(torch.ones(2, 8))
    of_one_model = root["rep", "shard", "tp"]._flatten("model").get_group()
    texts: list[Any] = [None] * (8 // rest)
    dist.all_gather_object(texts, str(error.value), group=of_one_model)
    assert len(set(texts)) == 1
    assert traffic(model).collectives == 0
    broadcast_replicas(model)
    model(torch.ones(2, 8)).sum().backward()
    mine = local_bytes(model)
    others: list[Any] = [None] * 2
    dist.all_gather_object(others, mine, group=root.get_group("rep"))
    assert others == [mine, mine]


@ranks(2)
def test_replicas_of_one_rank_initialised_by_their_rank_are_found() -> None:
    with torch.device("meta"):
        model = Tower()
    wrap(model, mesh=hsdp(2, 1))
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().normal_()
    with pytest.raises(DivergenceError, match=r"embed.weight and 13 more"):
        model(batch(0, 2))
    broadcast_replicas(model, source=1)
    torch.manual_seed(1)
    assert torch.equal(model.embed.weight.to_local().reshape(-1), torch.empty(64).normal_())
    assert model.embed.weight.placements[0] == Replicate()
    model(batch(0, 2))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.bool]
)
def test_a_digest_sees_every_bit_and_place(dtype: torch.dtype) -> None:
    values = (torch.arange(12).reshape(3, 4) % 7).to(dtype)
    assert torch.equal(digest(values), digest(values.clone()))
    seen = {tuple(digest(values).tolist())}
    raw = values.view(torch.uint8) if dtype != torch.complex64 else torch.view_as_real(values).view(torch.uint8)
    for i in range(raw.numel()):
        raw.view(-1)[i] ^= 1
        seen.add(tuple(digest(values).tolist()))
        raw.view(-1)[i] ^= 1
    assert len(seen) == 1 + raw.numel()
    assert not torch.equal(digest(values), digest(values.flip(0)))
    assert digest(values[:0]).tolist() == [0, 0]
