"""Frozen weights with a format, as for QLoRA: stored as codes, gathered as they are, and never encoded again."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from live_bytes import live_now
from ranks import RankPool, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from vescale_fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    ParamPolicy,
    VescaleError,
    broadcast_replicas,
    fully_shard,
    load,
    report,
    save,
    traffic,
)
from vescale_fsdp.formats.block_format import decode, encode
from vescale_fsdp.formats.encoded import EncodedTensor
from vescale_fsdp.plugins import registry


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter that trains."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.base.weight.requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Adapted(96, 160), nn.GELU(), Adapted(160, 64))


def base_in(name: str, fqn: str) -> ParamPolicy | None:
    return ParamPolicy(format=name) if fqn.endswith("base.weight") else None


def decoded(tensor: torch.Tensor, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    format, shape = registry().format(name), tuple(tensor.shape)
    return decode(format, encode(format, tensor.flatten(), shape), shape, tensor.numel(), dtype=dtype).view(shape)


def wrapped(name: str | None, **options: object) -> FSDPModule:
    """Each adapted layer on its own; without a format, with the weights that the format would decode to."""
    made = model()
    if name is None:
        for module in made.modules():
            if isinstance(module, Adapted):
                module.base.weight.data = decoded(module.base.weight.data, "mxfp4")
    policy = None if name is None else lambda fqn, param: base_in(name, fqn)
    for module in (made[0], made[2], made):
        fully_shard(module, param_policy=policy, **options)
    return made


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(8, 96, generator=torch.Generator().manual_seed(100 * step + rank))


def train(sharded: FSDPModule, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in sharded.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        loss = sharded(batch(dist.get_rank(), step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@ranks(1, 2, 3)
def test_adapters_train_bit_by_bit_as_on_the_decoded_weights_frozen(dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    stored, reference = wrapped("mxfp4", mp_policy=policy), wrapped(None, mp_policy=policy)
    first = train(stored)
    assert first == train(reference)
    assert first[-1] < first[0]
    for mine, theirs in zip(stored.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())


@pytest.mark.parametrize("name", ["fp8_block", "fp8_row_pow2", "mxfp8", "mxfp6_e2m3", "int8_flat"])
@ranks(3)
def test_every_format_stores_what_encoding_the_whole_weight_gives(name: str) -> None:
    sharded = wrapped(name)
    expected = decoded(model()[0].base.weight.data, name)
    assert torch.equal(sharded[0].base.weight.full_tensor(), expected)
    sharded[0].unshard()
    assert torch.equal(sharded[0].base.weight, expected)


@ranks(2)
def test_codes_are_made_once() -> None:
    format = registry().format("mxfp8")
    count = []
    encode_once = type(format).encode
    type(format).encode = lambda self, blocks: count.append(len(blocks)) or encode_once(self, blocks)
    try:
        sharded = wrapped("mxfp8")
        at_wrapping = len(count)
        train(sharded, steps=3)
    finally:
        type(format).encode = encode_once
    assert 0 < at_wrapping == len(count)


@ranks(2)
def test_full_precision_storage_is_freed_and_codes_take_what_they_say() -> None:
    before = live_now()
    layer = nn.Linear(512, 1024, bias=False)
    layer.weight.requires_grad_(False)
    fully_shard(layer, param_policy=lambda fqn, param: ParamPolicy(format="mxfp4"))
    gc.collect()
    elements = 512 * 1024 // dist.get_world_size()
    nbytes = elements // 2 + elements // 32
    assert report(layer).shard_nbytes == nbytes
    local = layer.weight.to_local()
    assert local.payload.untyped_storage().nbytes() == nbytes
    assert live_now() - before < 1.1 * nbytes
    layer(torch.randn(2, 512))
    layer.reshard()
    gc.collect()
    assert live_now() - before < 1.1 * nbytes


@ranks(2)
def test_what_is_stored_is_sent_without_a_copy() -> None:
    layer = nn.Linear(256, 256, bias=False)
    layer.weight.requires_grad_(False)
    fully_shard(
        layer,
        param_policy=lambda fqn, param: ParamPolicy(format="mxfp4"),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    layer(torch.randn(2, 256))
    moved = traffic(layer)
    assert moved.wire_bytes <= 0.29 * 256 * 256 * 2 / 2
    assert moved.copied_bytes == 256 * 256 * 2  # decoding alone


@ranks(2)
def test_a_state_dict_holds_decoded_values_that_load_back_without_changing_a_bit() -> None:
    sharded = wrapped("fp8_block")
    weight = sharded[0].base.weight
    codes = weight.to_local().payload.clone(), weight.to_local().scales.clone()
    state = sharded.state_dict()
    value = state["0.base.weight"]
    assert isinstance(value, DTensor)
    assert type(value.to_local()) is torch.Tensor
    assert torch.equal(value.full_tensor(), decoded(model()[0].base.weight.data, "fp8_block"))
    sharded.load_state_dict(state)
    assert sharded[0].base.weight is weight
    assert torch.equal(weight.to_local().payload, codes[0])
    assert torch.equal(weight.to_local().scales, codes[1])


@pytest.mark.parametrize("assign", [False, True])
@ranks(3)
def test_loading_full_or_sharded_values_encodes_them(assign: bool) -> None:
    source = fully_shard(nn.Linear(96, 80, bias=False))
    with torch.no_grad():
        source.weight.mul_(3)
    full = source.weight.full_tensor()
    target = nn.Linear(96, 80, bias=False)
    target.weight.requires_grad_(False)
    fully_shard(target, param_policy=lambda fqn, param: ParamPolicy(format="mxfp8"))
    weight = target.weight
    if assign:
        target.load_state_dict(source.state_dict(), assign=True)
    else:
        target.load_state_dict({"weight": full})
    assert target.weight is weight
    assert isinstance(weight.to_local(), EncodedTensor)
    assert torch.equal(weight.full_tensor(), decoded(full, "mxfp8"))
    x = batch(0)
    assert torch.equal(target(x), x @ decoded(full, "mxfp8").mT)


@ranks(2)
def test_a_model_on_the_meta_device_is_materialised_as_codes_and_loaded() -> None:
    with torch.device("meta"):
        layer = nn.Linear(96, 80, bias=False)
    layer.weight.requires_grad_(False)
    fully_shard(layer, param_policy=lambda fqn, param: ParamPolicy(format="mxfp8"))
    layer.to_empty(device="cpu")
    assert isinstance(layer.weight.to_local(), EncodedTensor)
    full = torch.randn(80, 96, generator=torch.Generator().manual_seed(1))
    layer.load_state_dict({"weight": full})
    x = batch(0)
    assert torch.equal(layer(x), x @ decoded(full, "mxfp8").mT)


@ranks(2)
def test_changing_the_dtype_of_the_model_leaves_the_codes() -> None:
    layer = nn.Linear(96, 80, bias=False)
    full = layer.weight.detach().clone()
    layer.weight.requires_grad_(False)
    fully_shard(layer, param_policy=lambda fqn, param: ParamPolicy(format="mxfp8"))
    layer.bfloat16()
    assert layer.weight.dtype == torch.bfloat16
    assert isinstance(layer.weight.to_local(), EncodedTensor)
    x = batch(0).bfloat16()
    assert torch.equal(layer(x), x @ decoded(full, "mxfp8", torch.bfloat16).mT)


@ranks(2)
def test_training_what_is_stored_as_codes_is_refused_by_name() -> None:
    sharded = wrapped("mxfp8")
    sharded[0].base.weight.requires_grad_(True)
    with pytest.raises(VescaleError, match=r"0\.base\.weight.*: were frozen when fully_shard stored them in mxfp8"):
        sharded(batch(0))


@ranks(2)
def test_writing_into_codes_is_refused_with_the_way_round() -> None:
    sharded = wrapped("mxfp8")
    weight = sharded[0].base.weight
    with torch.no_grad():
        with pytest.raises(VescaleError, match=r"stored in mxfp8 and not written element by element.*copy_"):
            weight.mul_(2)
        weight.copy_(weight * 2)  # powers of two change the scales alone
    assert torch.equal(weight.full_tensor(), 2 * decoded(model()[0].base.weight.data, "mxfp8"))


def test_offloaded_codes_visit_the_device_only_to_be_gathered(rank_pool: RankPool) -> None:
    rank_pool.run(2, __file__, "check_offload", {})


def check_offload() -> None:
    exact, offloaded = wrapped("mxfp4"), wrapped("mxfp4", offload_policy=CPUOffloadPolicy())
    assert train(exact) == train(offloaded)


@ranks(4)
def test_replicas_and_a_shard_kept_over_fewer_ranks_give_the_same_losses() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    first = train(wrapped("mxfp4"))
    assert train(wrapped("mxfp4", mesh=mesh)) == pytest.approx(first, rel=1e-5)
    assert train(wrapped("mxfp4", reshard_after_forward=2)) == first


@ranks(4)
def test_replicas_that_hold_other_codes_raise_and_can_be_made_equal() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layer = nn.Linear(96, 160, bias=False).requires_grad_(False)
    torch.manual_seed(mesh.get_local_rank("replicate"))
    nn.init.normal_(layer.weight)
    fully_shard(layer, mesh=mesh, param_policy=lambda fqn, param: ParamPolicy(format="mxfp4"))
    with pytest.raises(VescaleError, match=r"start from different weights, and would stay apart: weight\. Call"):
        layer(torch.ones(1, 96))
    broadcast_replicas(layer)
    torch.manual_seed(0)
    expected = decoded(nn.init.normal_(torch.empty(160, 96)), "mxfp4")
    assert torch.equal(layer.weight.full_tensor(), expected)  # type: ignore[operator]
    torch.testing.assert_close(layer(torch.ones(1, 96)), expected.sum(1)[None])


def save_both(folder: str) -> None:
    sharded = wrapped("mxfp4")
    train(sharded, steps=1)
    save(f"{folder}/ours", sharded)
    dcp.save(sharded.state_dict(), checkpoint_id=f"{folder}/dcp")


def load_both(folder: str) -> None:
    reference = wrapped("mxfp4")
    expected = decoded(model()[0].base.weight.data, "mxfp4")
    with torch.no_grad():
        reference[0].base.weight.copy_(reference[0].base.weight * 0)
    load(f"{folder}/ours", reference)
    assert torch.equal(reference[0].base.weight.full_tensor(), expected)
    other = wrapped("mxfp4")
    state = other.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    other.load_state_dict(state)
    assert torch.equal(other[0].base.weight.full_tensor(), expected)
    for mine, theirs in zip(reference.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())


def test_checkpoints_hold_decoded_values_at_any_world_size(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(2, __file__, "save_both", {"folder": str(tmp_path)})
    rank_pool.run(3, __file__, "load_both", {"folder": str(tmp_path)})
