"""Modules that compute with codes and scales themselves: what they find, what it costs, and where gradients go."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_bytes import live_now
from ranks import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale_fsdp import FSDPModule, ParamPolicy, VescaleError, fully_shard, traffic
from vescale_fsdp.formats.block_format import encode
from vescale_fsdp.formats.encoded import EncodedTensor
from vescale_fsdp.plugins import registry


class BlockGemm(torch.autograd.Function):
    """x @ w.T from 4-bit codes and one power of two for 32 columns, without the format's own decode."""

    VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

    @classmethod
    def values(cls, payload: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        codes = torch.stack((payload & 15, payload >> 4), 1).view(shape)
        return cls.VALUES[codes.long()] * (scales.float() - 127).exp2().view(shape[0], -1).repeat_interleave(32, 1)

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, weight: EncodedTensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight.payload, weight.scales)
        ctx.shape = tuple(weight.shape)
        return x @ cls.values(weight.payload, weight.scales, ctx.shape).mT

    @classmethod
    def backward(cls, ctx: Any, grad: torch.Tensor) -> Any:
        x, payload, scales = ctx.saved_tensors
        return grad @ cls.values(payload, scales, ctx.shape), grad.mT @ x


class BlockLinear(nn.Module):
    """Wants its weight as codes and scales; counts how often it got them."""

    encoded_params = frozenset({"weight"})

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / 10)
        self.taken = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.weight, EncodedTensor):
            return x @ self.weight.mT
        self.taken += 1
        return BlockGemm.apply(x, self.weight)


class Lazy(BlockLinear):
    """Takes codes, and computes with them as with any tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class Decoded(BlockLinear):
    encoded_params = frozenset()


def wrapped(kind: type[BlockLinear], *, frozen: bool = False, **options: Any) -> FSDPModule:
    torch.manual_seed(2)
    made = nn.Sequential(kind(96, 64), nn.GELU(), kind(64, 128), nn.Linear(128, 8))
    made[0].weight.requires_grad_(not frozen)
    for module in (made[0], made[2], made):
        fully_shard(
            module, param_policy=lambda fqn, param: ParamPolicy(format="mxfp4") if param.ndim == 2 else None, **options
        )
    return made


def train(sharded: FSDPModule, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW([param for param in sharded.parameters() if param.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = sharded(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@ranks(1, 2, 3)
def test_a_module_that_takes_codes_trains_as_one_whose_weights_are_decoded_for_it(frozen: bool) -> None:
    taking, decoded = wrapped(BlockLinear, frozen=frozen), wrapped(Decoded, frozen=frozen)
    assert train(taking) == train(decoded)
    assert (taking[0].taken, decoded[0].taken) == (3, 0)
    for mine, theirs in zip(taking.parameters(), decoded.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())


@ranks(2)
def test_code_that_knows_nothing_of_formats_computes_with_decoded_values() -> None:
    assert train(wrapped(Lazy)) == train(wrapped(Decoded))


@ranks(3)
def test_what_is_handed_over_are_the_codes_of_the_whole_weight() -> None:
    sharded = wrapped(BlockLinear)
    full = sharded[2].weight.full_tensor()
    sharded[2].unshard()
    weight = sharded[2].weight
    expected = encode(registry().format("mxfp4"), full.flatten(), tuple(full.shape))
    assert isinstance(weight, EncodedTensor)
    assert torch.equal(weight.payload, expected.payload)
    assert torch.equal(weight.scales, expected.scales)
    assert weight.format is registry().format("mxfp4")


@ranks(2)
def test_nothing_is_decoded_and_codes_are_freed_after_use() -> None:
    layer = BlockLinear(512, 512)
    layer.weight.requires_grad_(False)
    fully_shard(layer, param_policy=lambda fqn, param: ParamPolicy(format="mxfp4"))
    gc.collect()
    before = live_now()
    layer.unshard()
    codes = 512 * 512 // 2 + 512 * 512 // 32
    assert codes <= live_now() - before < 1.1 * codes + 512 * 512 // 32
    assert traffic(layer).copied_bytes == 0
    layer.reshard()
    gc.collect()
    assert live_now() - before < 0.1 * codes


@ranks(2)
def test_only_the_parameters_that_a_module_names_stay_encoded() -> None:
    sharded = wrapped(BlockLinear)
    sharded.unshard()
    assert type(sharded[3].weight.data) is torch.Tensor
    sharded.reshard()


@ranks(2)
def test_modules_that_share_a_weight_must_agree() -> None:
    pair = nn.ModuleList([BlockLinear(64, 64), Decoded(64, 64)])
    pair[1].weight = pair[0].weight
    holder = nn.Sequential(*pair)
    with pytest.raises(VescaleError, match=r"0\.weight: of the modules that share it, some take it encoded"):
        fully_shard(holder, param_policy=lambda fqn, param: ParamPolicy(format="mxfp4"))


@ranks(4)
def test_what_is_not_built_says_so_with_the_names() -> None:
    with pytest.raises(NotImplementedError, match=r"weight.*kept over 2 ranks after forward is decoded"):
        wrapped(BlockLinear, reshard_after_forward=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = BlockLinear(64, 64)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
    with pytest.raises(NotImplementedError, match=r"weight.*tensor-parallel parameters to modules is not built"):
        fully_shard(layer, mesh=mesh["dp"], param_policy=lambda fqn, param: ParamPolicy(format="mxfp4"))


class Recording:
    """A user's all-gather: allocates, and is called with bytes."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(size, 77, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.dtypes.append(input_tensor.dtype)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@pytest.mark.parametrize("kind", [BlockLinear, Decoded])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@ranks(2)
def test_a_users_all_gather_moves_codes_and_scales_as_bytes(kind: type[BlockLinear], frozen: bool) -> None:
    expected = train(wrapped(kind, frozen=frozen))
    sharded, comm = wrapped(kind, frozen=frozen), Recording()
    sharded[0].set_custom_all_gather(comm)
    assert train(sharded) == expected
    assert set(comm.dtypes) == {torch.uint8}
