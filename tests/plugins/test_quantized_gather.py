"""A group gathered in a block format: decoded values, bytes on the wire, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp import ParamPolicy
from vescale_fsdp.formats.block_format import decode, encode
from vescale_fsdp.group.buffer import DBuffer
from vescale_fsdp.group.quantized import QuantizedGather
from vescale_fsdp.group.traffic import Traffic
from vescale_fsdp.mesh import DataMesh
from vescale_fsdp.plan import GroupPlan
from vescale_fsdp.planner import plan_group
from vescale_fsdp.plugins import granularity_of, registry
from vescale_fsdp.spec import ParamSpec

SHAPES = {"big": (512, 256), "edges": (130, 70), "experts": (3, 50, 40), "row": (600,), "none": (0, 8), "scalar": ()}
FORMATS = ("fp8_block", "fp8_row_pow2", "mxfp8", "mxfp6_e3m2", "mxfp4")


def planned(shapes: dict[str, tuple[int, ...]], name: str, num_ranks: int, **options: int) -> GroupPlan:
    policy = ParamPolicy(format=name)
    specs = [ParamSpec(fqn, shape, "float32", granularity_of(fqn, shape, policy)) for fqn, shape in shapes.items()]
    return plan_group(specs, num_ranks, unit=64, align=64, **options)


def values(shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))


def gathered(plan: GroupPlan, name: str, dtype: torch.dtype, *, async_op: bool = False) -> tuple[DBuffer, Traffic]:
    mesh = DataMesh.of(init_device_mesh("cpu", (dist.get_world_size(),)))
    numels = [spec.numel for spec in plan.specs]
    device = torch.device("cpu")
    shard = DBuffer.shard(plan.layout, numels, mesh.rank, dtype=torch.float32, device=device)
    for i, spec in enumerate(plan.specs):
        span = plan.shard_range(spec.fqn, mesh.rank)
        shard.view(i).copy_(values(spec.shape).flatten()[span.begin : span.end])
    whole = DBuffer.whole(plan.layout, numels, dtype=dtype, device=device)
    traffic = Traffic()
    QuantizedGather(plan.layout, [spec.shape for spec in plan.specs], registry().format(name)).start(
        shard, whole, mesh, comm=None, async_op=async_op, traffic=traffic
    ).wait()
    return whole, traffic


@pytest.mark.parametrize("name", FORMATS)
@ranks(1, 2, 3, 5)
def test_every_rank_gets_what_encoding_and_decoding_the_whole_tensors_gives(name: str) -> None:
    plan = planned(SHAPES, name, dist.get_world_size())
    format = registry().format(name)
    for dtype, async_op in ((torch.bfloat16, False), (torch.float32, True)):
        whole, _ = gathered(plan, name, dtype, async_op=async_op)
        for i, (fqn, shape) in enumerate(SHAPES.items()):
            full = values(shape).flatten()
            expected = decode(format, encode(format, full, shape), shape, full.numel(), dtype=dtype)
            assert torch.equal(whole.view(i), expected), fqn


@ranks(5)
def test_96_rows_over_5_ranks_split_no_block_of_32_rows() -> None:
    """torchtitan's MXFP8 weights needed padding in the gather hook when rows were uneven (torchtitan#4371)."""
    plan = planned({"w": (96, 64)}, "int8_block", 5)
    assert all(len(plan.shard_range("w", rank)) % (32 * 64) == 0 for rank in range(5))
    whole, _ = gathered(plan, "int8_block", torch.float32)
    format, full = registry().format("int8_block"), values((96, 64)).flatten()
    assert torch.equal(whole.view(0), decode(format, encode(format, full, (96, 64)), (96, 64), full.numel()))


@ranks(4)
def test_ranks_that_own_nothing_add_nothing_at_every_gather() -> None:
    """An empty shard used to break the largest magnitude, and scales changed shape (torchtitan#764)."""
    plan = planned({"w": (2, 64)}, "fp8_block", 4)
    for _ in range(2):
        whole, _ = gathered(plan, "fp8_block", torch.float32)
        format, full = registry().format("fp8_block"), values((2, 64)).flatten()
        encoded = encode(format, full, (2, 64))
        assert encoded.scales.shape == (1,)
        assert torch.equal(whole.view(0), decode(format, encoded, (2, 64), full.numel()))


@ranks(3)
def test_several_lanes_are_gathered_each_in_place() -> None:
    plan = planned({"a": (384, 64), "b": (3, 100, 50), "c": (7, 33)}, "mxfp8", 3, max_lanes=3)
    whole, traffic = gathered(plan, "mxfp8", torch.float32)
    format = registry().format("mxfp8")
    for i, spec in enumerate(plan.specs):
        full = values(spec.shape).flatten()
        assert torch.equal(whole.view(i), decode(format, encode(format, full, spec.shape), spec.shape, full.numel()))
    assert traffic.gathers == len(plan.lanes) + 1


@pytest.mark.parametrize(("name", "most"), [("fp8_block", 0.53), ("mxfp8", 0.55), ("mxfp4", 0.29)])
@ranks(4)
def test_bytes_on_the_wire_against_bfloat16(name: str, most: float) -> None:
    shapes = {"wq": (256, 256), "wo": (256, 256), "w1": (1024, 256), "w3": (1024, 256), "w2": (256, 1024)}
    num_ranks = dist.get_world_size()
    _, traffic = gathered(planned(shapes, name, num_ranks), name, torch.bfloat16)
    bfloat16 = plan_group([ParamSpec(fqn, shape) for fqn, shape in shapes.items()], num_ranks, unit=8, align=8)
    assert traffic.wire_bytes <= most * (num_ranks - 1) * bfloat16.share * 2
