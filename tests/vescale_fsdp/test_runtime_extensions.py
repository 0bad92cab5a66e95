"""Tensor subclasses written for FSDP2's gather extensions work unchanged, with unequal shards and without padding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Tower, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils._pytree import tree_map_only

from vescale_fsdp import broadcast_replicas, fully_shard, traffic

aten = torch.ops.aten
KEEPS_TYPE = {
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten.add_.Tensor,
}


class HalfGathered(torch.Tensor):
    """A float32 weight that is gathered in bfloat16, with the number of its rows' sums in the metadata."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> HalfGathered:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda each: each._data, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, out) if func in KEEPS_TYPE else out

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (self._data.to(torch.bfloat16),), mesh.size()

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert metadata == dist.get_world_size()
        (weight,) = outputs
        if out is not None:
            assert out.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
            return None
        return weight, (weight,)


def with_half_gathered(model: Tower) -> Tower:
    for block in model.blocks:
        for linear in (block.up, block.down):
            linear.weight = nn.Parameter(HalfGathered(linear.weight.detach().clone()))
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
        block.up.bias = None
        block.norm = nn.LayerNorm(block.norm.normalized_shape, elementwise_affine=False)
        block.register_forward_hook(lambda module, args, out: out.float())
    return model


def plain(model: nn.Module) -> nn.Module:
    """The same model, whose weights are rounded in forward."""
    for block in model.blocks:
        for linear in (block.up, block.down):
            torch.nn.utils.parametrize.register_parametrization(linear, "weight", Rounded(), unsafe=True)
        block.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
        block.up.bias = None
        block.norm = nn.LayerNorm(block.norm.normalized_shape, elementwise_affine=False)
        block.register_forward_hook(lambda module, args, out: out.float())
    return model


class Rounded(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.bfloat16()


@ranks(2)
def test_a_subclass_trains_like_under_fsdp2() -> None:
    torch.manual_seed(2)
    source = Tower()
    losses = []
    for shard in (fully_shard, torch_fully_shard):
        model = with_half_gathered(copy.deepcopy(source))
        for block in model.blocks:
            shard(block)
        shard(model)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(3):
            loss = model(batch(step, 2, dist.get_rank())).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]
    assert losses[0][2] != losses[0][0]


@ranks(2)
def test_replicas_of_a_subclass_are_not_said_to_be_equal_without_a_copy() -> None:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(HalfGathered(torch.full((4, 4), float(dist.get_rank()))))
    fully_shard(layer, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("rep", "dp")))
    with pytest.raises(NotImplementedError, match=r"weight: gathers itself .* the same seed"):
        broadcast_replicas(layer)


@pytest.mark.parametrize("hidden", [5, 2])
@ranks(3)
def test_a_subclass_with_unequal_and_empty_shards_equals_the_reference(hidden: int) -> None:
    torch.manual_seed(2)
    source = Tower(hidden=hidden)
    model = with_half_gathered(copy.deepcopy(source))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    reference = plain(source)
    for step in range(2):
        for each, rank in ((model, dist.get_rank()), (reference, None)):
            each(batch(step, 3, rank)).square().mean().backward()
    found = dict(model.named_parameters())
    for name, param in reference.named_parameters():
        mine = found[name.replace("parametrizations.", "").replace(".original", "")]
        torch.testing.assert_close(mine.grad.full_tensor().float(), param.grad, rtol=0.03, atol=1e-3)
    assert traffic(model).gathered_bytes > 0


@ranks(4)
def test_a_number_of_ranks_after_forward_is_refused_for_subclasses_when_wrapping() -> None:
    """FSDP2 raises a NotImplementedError without text, in backward."""
    model = with_half_gathered(Tower())
    with pytest.raises(NotImplementedError, match=r"'up.weight', 'down.weight'.*keep no shard over 2 ranks.*True or"):
        fully_shard(model.blocks[0], reshard_after_forward=2)
    assert not hasattr(model.blocks[0], "unshard")
