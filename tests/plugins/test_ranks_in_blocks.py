"""Real ranks: encoding a shard needs no message, and 8-bit state is the same at every world size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankPool, ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor.debug import CommDebugMode

from ragged_dtensor import RaggedShard, distribute_tensor
from vescale_fsdp import ParamPolicy
from vescale_fsdp.errors import VescaleError
from vescale_fsdp.formats.block_format import encode
from vescale_fsdp.formats.tiling import Tiling
from vescale_fsdp.optim import AdamW8bit
from vescale_fsdp.planner import plan_group
from vescale_fsdp.plugins import granularity_of, registry
from vescale_fsdp.spec import ParamSpec
from vescale_fsdp.testing import SHAPES

FORMATS = ("fp8_block", "fp8_row_pow2", "mxfp8", "mxfp6_e2m3", "mxfp4", "dynamic8_block", "int8_flat")
"""One of each shape and width; the contract tests cut all formats at the same world sizes, without ranks."""
PARAMS = {"square": (96, 64), "edges": (130, 70), "experts": (3, 50, 40), "bias": (500,), "gate": (7, 9)}
STEPS = 3


def placed(full: torch.Tensor, fqn: str, policy: ParamPolicy | None, mesh: DeviceMesh) -> DTensor:
    """The tensor cut as the planner cuts it when it is alone, over the last axis of the mesh."""
    spec = ParamSpec(fqn, tuple(full.shape), "float32", granularity_of(fqn, tuple(full.shape), policy))
    plan = plan_group([spec], mesh.size(mesh.ndim - 1), unit=64, align=64)
    units = plan.units(fqn)
    if full.ndim == 0:
        placement: Placement = RaggedShard((), units)
    else:
        placement = RaggedShard(tuple(range(full.ndim)), units)
    return distribute_tensor(full, mesh, [*[Replicate()] * (mesh.ndim - 1), placement], src_data_rank=None)


def value(fqn: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + len(fqn))
    return torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))


@ranks(1, 2, 3, 4, 7)
def test_encoding_a_shard_sends_nothing_and_equals_cutting_the_encoded_tensor() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cases = [(registry().format(name), value("weight", shape, 0)) for name in FORMATS for shape in SHAPES.values()]
    shards = [placed(full, "weight", ParamPolicy(format=format.name), mesh) for format, full in cases]
    with CommDebugMode() as comm:
        encoded = [
            encode(format, shard.to_local().flatten(), tuple(shard.shape))
            for (format, _), shard in zip(cases, shards, strict=True)
        ]
    assert comm.get_total_counts() == 0
    for (format, full), shard, mine in zip(cases, shards, encoded, strict=True):
        whole = encode(format, full.flatten(), tuple(full.shape))
        tiling = Tiling(format.block_shape, tuple(full.shape))
        owned = numels(shard)
        before = owned[: mesh.get_local_rank()]
        begin, first = sum(before) * format.bits // 8, sum(map(tiling.count, before))
        assert torch.equal(mine.payload, whole.payload[begin : begin + len(mine.payload)])
        scales = whole.scales[first : first + len(mine.scales)]
        assert torch.equal(mine.scales.view(torch.uint8), scales.view(torch.uint8))
        assert sum(map(tiling.count, owned)) == len(whole.scales)


def numels(shard: DTensor) -> list[int]:
    placement = shard.placements[-1]
    assert isinstance(placement, RaggedShard)
    return [shard.numel() * unit // placement.local_units.total for unit in placement.local_units]


def trained(mesh: DeviceMesh | None, steps: range, optimizer: AdamW8bit | None = None) -> AdamW8bit:
    """An optimizer after `steps` of the same gradients everywhere; without a mesh, on whole tensors."""
    if optimizer is None:
        params = []
        for fqn, shape in PARAMS.items():
            full = value(fqn, shape, 100)
            policy = AdamW8bit.policy(fqn, full)
            params.append((fqn, nn.Parameter(full if mesh is None else placed(full, fqn, policy, mesh))))
        optimizer = AdamW8bit(params, lr=0.01)
    for step in steps:
        for fqn, param in zip(PARAMS, optimizer.param_groups[0]["params"], strict=True):
            grad = value(fqn, PARAMS[fqn], step)
            if mesh is not None:
                grad = distribute_tensor(grad, mesh, param.placements, src_data_rank=None)
            param.grad = grad
        optimizer.step()
    return optimizer


def assert_equal_to_whole(optimizer: AdamW8bit, whole: AdamW8bit) -> None:
    pairs = zip(optimizer.param_groups[0]["params"], whole.param_groups[0]["params"], strict=True)
    for fqn, (mine, reference) in zip(PARAMS, pairs, strict=True):
        assert torch.equal(mine.full_tensor(), reference), fqn
        assert optimizer.state[mine].keys() == whole.state[reference].keys()
        for key, expected in whole.state[reference].items():
            found = optimizer.state[mine][key]
            found = found.full_tensor() if isinstance(found, DTensor) else found
            assert found.dtype == expected.dtype, (fqn, key)
            assert torch.equal(found, expected), (fqn, key)


@ranks(1, 2, 3, 4, 7)
def test_parameters_and_state_are_those_of_one_process_bit_by_bit() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert_equal_to_whole(trained(mesh, range(STEPS)), trained(None, range(STEPS)))


@ranks(4)
def test_replicas_keep_the_same_state() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    assert_equal_to_whole(trained(mesh, range(STEPS)), trained(None, range(STEPS)))


@ranks(3)
def test_a_step_sends_nothing() -> None:
    mesh = init_device_mesh("cpu", (3,))
    optimizer = trained(mesh, range(1))
    with CommDebugMode() as comm:
        optimizer.step()
    assert comm.get_total_counts() == 0


@ranks(3)
def test_codes_are_placed_as_their_parameter_and_scales_as_their_blocks() -> None:
    optimizer = trained(init_device_mesh("cpu", (3,)), range(1))
    square = optimizer.param_groups[0]["params"][0]
    state = optimizer.state[square]
    assert state["exp_avg_codes"].placements == square.placements
    assert state["exp_avg_codes"].shape == square.shape
    assert square.placements == (RaggedShard((0, 1), (1, 1, 1)),)
    assert state["exp_avg_scales"].placements == (RaggedShard((0,), (1, 1, 1)),)
    assert state["exp_avg_scales"].shape == (6,)


@ranks(2)
def test_every_rank_refuses_a_parameter_that_is_cut_inside_a_block() -> None:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(96, 64), mesh, [RaggedShard((0,), (40, 56))]))
    message = r"proj.weight: cut after 2560 elements, but blocks \(32, 32\) may be cut every 2048"
    with pytest.raises(VescaleError, match=message):
        AdamW8bit([("proj.weight", param)])


@ranks(2)
def test_state_in_blocks_of_a_plainly_sharded_parameter_is_not_built_and_says_so() -> None:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(torch_distribute(torch.ones(64, 64), mesh, [Shard(1)]))
    with pytest.raises(
        NotImplementedError, match="w: state in blocks is built for one RaggedShard axis, got placements"
    ):
        AdamW8bit([("w", param)])
    AdamW8bit([("w", param)], state_format=None)


@ranks(2)
def test_a_gradient_placed_in_another_way_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(64, 64), mesh, [RaggedShard((0,), (1, 1))]))
    optimizer = AdamW8bit([("w", param)])
    param.grad = distribute_tensor(torch.ones(64, 64), mesh, [Replicate()])
    with pytest.raises(VescaleError, match="w: expected a gradient placed as its parameter"):
        optimizer.step()


def saved_state(optimizer: AdamW8bit) -> dict[str, Any]:
    return {
        fqn: {"param": param, **optimizer.state[param]}
        for fqn, param in zip(PARAMS, optimizer.param_groups[0]["params"], strict=True)
    }


def save_after_two_steps(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dcp.save(saved_state(trained(mesh, range(2))), checkpoint_id=folder)


def load_and_continue(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    optimizer = trained(mesh, range(7, 8))  # other values, to be overwritten
    dcp.load(saved_state(optimizer), checkpoint_id=folder)
    assert_equal_to_whole(trained(mesh, range(2, 5), optimizer), trained(None, range(5)))


def test_a_checkpoint_of_two_ranks_continues_on_four_as_if_never_stopped(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(2, __file__, "save_after_two_steps", {"folder": str(tmp_path)})
    for num_ranks in (4, 2, 1):
        rank_pool.run(num_ranks, __file__, "load_and_continue", {"folder": str(tmp_path)})
