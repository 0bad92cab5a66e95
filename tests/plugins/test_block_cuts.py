"""Cuts of other parallelisms against blocks: a rule, checked by drawing blocks, and through fully_shard."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from block_drawing import blocks_by_drawing
from ranks import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from vescale_fsdp import ParamPolicy, VescaleError, fully_shard, report
from vescale_fsdp.formats.block_cuts import block_step, check_other_cuts
from vescale_fsdp.formats.block_format import decode, encode
from vescale_fsdp.plugins import registry

SHAPES = [(12,), (8, 6), (6, 8), (4, 6, 8), (3, 4, 6), (4, 2, 3, 2), (6, 2, 2, 4)]
BLOCKS = [(4,), (6,), (1, 4), (2, 4), (4, 4), (3, 2)]


def parts_have_the_blocks_of_the_whole(shape: tuple[int, ...], dim: int, size: int, block: tuple[int, ...]) -> bool:
    """Whether the blocks of every part, as a tensor of its own, are blocks of the whole tensor."""
    numbered = torch.arange(math.prod(shape)).view(shape)
    whole = {frozenset(indices) for indices in blocks_by_drawing(shape, block)}
    for part in numbered.split(size, dim):
        flat = part.flatten().tolist()
        own = blocks_by_drawing(tuple(part.shape), block)
        if any(frozenset(flat[i] for i in indices) not in whole for indices in own):
            return False
    return True


@pytest.mark.parametrize(("shape", "block"), list(itertools.product(SHAPES, BLOCKS)), ids=str)
def test_a_cut_is_granted_if_and_only_if_each_part_alone_has_blocks_of_the_whole(
    shape: tuple[int, ...], block: tuple[int, ...]
) -> None:
    for dim in range(len(shape)):
        for size in (s for s in range(1, shape[dim]) if shape[dim] % s == 0):
            granted = size % block_step(shape, dim, block) == 0
            assert granted == parts_have_the_blocks_of_the_whole(shape, dim, size, block), (dim, size)


def test_two_axes_that_cut_one_dim_count_together() -> None:
    format = registry().format("fp8_block")
    check_other_cuts("w", (512, 128), [(0, 2), (0, 2)], format)
    message = (
        r"layers\.0\.w: Shard\(0\) leaves 64 of 512 on a rank, which splits 128x128 blocks of fp8_block: cuts along "
        r"dim 0 must fall every 128"
    )
    with pytest.raises(VescaleError, match=message):
        check_other_cuts("layers.0.w", (512, 128), [(0, 4), (0, 2)], format)


def tensor_parallel(shape: tuple[int, int], dim: int) -> tuple[nn.Module, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Module()
    full = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    module.w = nn.Parameter(distribute_tensor(full, mesh["tp"], [Shard(dim)]))
    module.mesh = mesh["dp"]
    return module, full


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@ranks(4)
def test_what_is_encoded_under_tensor_parallelism_is_the_local_part(dim: int, frozen: bool) -> None:
    module, full = tensor_parallel((256, 128), dim)
    module.w.requires_grad_(not frozen)
    fully_shard(module, mesh=module.mesh, param_policy=lambda fqn, param: ParamPolicy(format="mxfp4"))
    module.unshard()
    part = full.chunk(2, dim)[dist.get_rank() % 2].contiguous()
    format, shape = registry().format("mxfp4"), tuple(part.shape)
    expected = decode(format, encode(format, part.flatten(), shape), shape, part.numel()).view(shape)
    assert isinstance(module.w, DTensor)
    assert torch.equal(module.w.to_local(), expected)


@pytest.mark.parametrize("wish", ["format", "state_format"])
@ranks(4)
def test_a_tensor_parallel_cut_inside_a_block_is_refused_by_name(wish: str) -> None:
    module, _ = tensor_parallel((96, 48), 1)
    name = "mxfp8" if wish == "format" else "dynamic8_block"
    with pytest.raises(VescaleError, match=rf"w: Shard\(1\) leaves 24 of 48 .* blocks of {name}.* every 32"):
        fully_shard(module, mesh=module.mesh, param_policy=lambda fqn, param: ParamPolicy(**{wish: name}))


@ranks(4)
def test_rows_of_blocks_may_be_cut_by_both_parallelisms() -> None:
    module, _ = tensor_parallel((512, 96), 0)
    fully_shard(module, mesh=module.mesh, param_policy=lambda fqn, param: ParamPolicy(format="fp8_block"))
    assert "128 rows (fp8_block by vescale-fp8-block)" in report(module).plan.explain()
