"""fully_shard with a block format: what forward sees, where gradients go, and that training follows."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp import MixedPrecisionPolicy, ParamPolicy, VescaleError, fully_shard, report, traffic
from vescale_fsdp.formats.block_format import decode, encode
from vescale_fsdp.plugins import registry


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.LayerNorm(160), nn.Linear(160, 64, bias=False))


def matrices_in(name: str) -> Callable[[str, nn.Parameter], ParamPolicy | None]:
    return lambda fqn, param: ParamPolicy(format=name) if param.ndim == 2 else None


def decoded(tensor: torch.Tensor, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    format, shape = registry().format(name), tuple(tensor.shape)
    return decode(format, encode(format, tensor.flatten(), shape), shape, tensor.numel(), dtype=dtype).view(shape)


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(8, 96, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "mxfp4"])
@ranks(1, 2, 3)
def test_forward_sees_decoded_weights_and_gradients_reach_the_full_precision_ones(name: str) -> None:
    plain = model()
    whole = copy.deepcopy(plain)
    for param in whole.parameters():
        if param.ndim == 2:
            param.data = decoded(param.data, name)
    sharded = fully_shard(plain, param_policy=matrices_in(name))
    num_ranks = dist.get_world_size()
    sharded(batch(dist.get_rank())).square().sum().backward()
    for rank in range(num_ranks):
        (whole(batch(rank)).square().sum() / num_ranks).backward()
    fresh = model()
    for (fqn, param), reference, master in zip(
        sharded.named_parameters(), whole.parameters(), fresh.parameters(), strict=True
    ):
        assert isinstance(param, DTensor)
        assert torch.equal(param.full_tensor(), master), fqn
        torch.testing.assert_close(param.grad.full_tensor(), reference.grad, rtol=1e-4, atol=1e-5)


@ranks(2)
def test_unsharded_parameters_are_the_decoded_ones_in_the_compute_dtype() -> None:
    sharded = fully_shard(
        model(), param_policy=matrices_in("mxfp8"), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    sharded.unshard()
    for found, master in zip(sharded.parameters(), model().parameters(), strict=True):
        expected = decoded(master.data, "mxfp8", torch.bfloat16) if master.ndim == 2 else master.bfloat16()
        assert torch.equal(found, expected)
    sharded.reshard()


def losses(name: str | None, *, steps: int = 30, lr: float = 3e-3) -> list[float]:
    """Every rank trains on the same batches, so that the curve is the same at any world size."""
    policy = matrices_in(name) if name is not None else None
    sharded = fully_shard(model(), param_policy=policy, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=lr)
    teacher = torch.randn(96, 64, generator=torch.Generator().manual_seed(9)) / 10
    found = []
    for step in range(steps):
        x = batch(0, step)
        loss = (sharded(x).float() - x @ teacher).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@ranks(2)
def test_training_through_fp8_weights_follows_bfloat16() -> None:
    exact, near = losses(None), losses("fp8_block")
    assert near[-1] < 0.5 * near[0]
    assert abs(near[-1] - exact[-1]) < 0.05 * exact[-1]


@ranks(2)
def test_training_through_mxfp4_weights_trains() -> None:
    found = losses("mxfp4")
    assert found[-1] < 0.6 * found[0]


@ranks(2)
def test_the_plan_names_the_plugin_and_what_it_asks() -> None:
    sharded = fully_shard(model(), param_policy=matrices_in("fp8_block"))
    sharded(batch(0))
    text = report(sharded).plan.explain()
    assert "fp8_block by vescale-fp8-block" in text


@ranks(2)
def test_fewer_bytes_travel() -> None:
    sizes = []
    for policy in (None, matrices_in("mxfp8")):
        sharded = fully_shard(
            nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)),
            param_policy=policy,
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        )
        sharded(torch.randn(2, 256))
        sizes.append(traffic(sharded).wire_bytes)
    assert sizes[1] <= 0.55 * sizes[0]


@ranks(2)
def test_wishes_that_cannot_be_granted_name_the_parameter() -> None:
    with pytest.raises(ValueError, match="no block format is named 'fp9'"):
        fully_shard(model(), param_policy=matrices_in("fp9"))
    with pytest.raises(VescaleError, match=r"0\.weight: param_policy gives a ParamPolicy or None, got 'fp8_block'"):
        fully_shard(model(), param_policy=lambda fqn, param: "fp8_block")  # type: ignore[arg-type, return-value]
    counter = nn.Module()
    counter.count = nn.Parameter(torch.zeros(8, dtype=torch.int32), requires_grad=False)
    with pytest.raises(VescaleError, match="count: a block format holds floating-point values"):
        fully_shard(counter, param_policy=lambda fqn, param: ParamPolicy(format="mxfp8"))


@ranks(4)
def test_shards_kept_over_fewer_ranks_hold_the_decoded_values() -> None:
    grads = []
    for reshard in (True, 2):
        sharded = fully_shard(model(), param_policy=matrices_in("mxfp4"), reshard_after_forward=reshard)
        sharded(batch(dist.get_rank())).square().sum().backward()
        grads.append([param.grad.full_tensor() for param in sharded.parameters()])
    for one, two in zip(*grads, strict=True):
        assert torch.equal(one, two)


class Halved(torch.Tensor):
    """A parameter that gathers itself."""

    def fsdp_pre_all_gather(self, mesh: object) -> tuple[tuple[torch.Tensor, ...], None]:
        return (self.bfloat16(),), None

    def fsdp_post_all_gather(self, gathered: tuple[torch.Tensor, ...], *args: object, out: object = None) -> object:
        return gathered[0], gathered


@ranks(1)
def test_a_format_for_a_parameter_that_gathers_itself_is_not_a_silent_no_op() -> None:
    layer = nn.Linear(64, 64, bias=False)
    layer.weight = nn.Parameter(torch.randn(64, 64).as_subclass(Halved))
    with pytest.raises(NotImplementedError, match=r"weight: a \w+ gathers itself .* format 'mxfp8' would do nothing"):
        fully_shard(layer, param_policy=matrices_in("mxfp8"))
