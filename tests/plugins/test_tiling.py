"""Which elements make a block, by drawing them: shapes that divide, shapes that do not, stacks, rows, nothing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from block_drawing import blocks_by_drawing

from vescale_fsdp.errors import VescaleError
from vescale_fsdp.formats.tiling import Tiling

SHAPES = [
    (),
    (1,),
    (5,),
    (64,),
    (7, 6),
    (8, 8),
    (1, 70),
    (4, 3, 5),
    (3, 4, 8),
    (1, 5, 6),
    (4, 3, 3, 3),
    (0,),
    (3, 0),
    (0, 4),
]
BLOCKS = [(1,), (4,), (1, 4), (2, 4), (4, 4), (3, 1), (128, 128)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_hold_the_elements_that_a_drawing_gives_them(shape: tuple[int, ...], block: tuple[int, ...]) -> None:
    tiling = Tiling(block, shape)
    flat = torch.arange(1, tiling.numel + 1)
    split = tiling.split(flat)
    assert [[v - 1 for v in row if v] for row in split.tolist()] == blocks_by_drawing(shape, block)
    assert split.shape == (tiling.num_blocks, math.prod(block))
    assert torch.equal(tiling.join(split, tiling.numel), flat)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_cut_at_a_multiple_of_the_granularity_leaves_blocks_whole(
    shape: tuple[int, ...], block: tuple[int, ...]
) -> None:
    tiling = Tiling(block, shape)
    flat = torch.arange(1, tiling.numel + 1)
    whole = tiling.split(flat)
    for cut in range(0, tiling.numel + 1, tiling.granularity):
        head, tail = flat[:cut], flat[cut:]
        assert torch.equal(torch.cat([tiling.split(head), tiling.split(tail)]), whole)
        assert tiling.count(cut) + tiling.count(tiling.numel - cut) == tiling.num_blocks
        assert torch.equal(torch.cat([tiling.join(tiling.split(piece), len(piece)) for piece in (head, tail)]), flat)


@pytest.mark.parametrize(("block", "shape"), list(itertools.product(BLOCKS, SHAPES)), ids=str)
def test_no_smaller_divisor_of_the_granularity_would_do(block: tuple[int, ...], shape: tuple[int, ...]) -> None:
    granularity = Tiling(block, shape).granularity
    blocks = blocks_by_drawing(shape, block)
    for finer in (d for d in range(1, granularity) if granularity % d == 0):
        cuts = range(finer, math.prod(shape), finer)
        splits = any(min(indices) < cut <= max(indices) for cut in cuts for indices in blocks)
        assert splits or not cuts, f"{finer} elements leave blocks whole too"


def test_granularity_of_the_drawing_in_the_docstring() -> None:
    assert Tiling((2, 4), (5, 6)).granularity == 12
    assert Tiling((4,), (5, 6)).granularity == 4


def test_rows_that_divide_into_blocks_may_be_cut_between_blocks_and_others_between_rows_only() -> None:
    assert Tiling((1, 32), (96, 64)).granularity == 32
    assert Tiling((1, 32), (96, 50)).granularity == 50


def test_an_expert_whose_rows_end_inside_a_block_stays_whole() -> None:
    assert Tiling((128, 128), (8, 256, 64)).granularity == 128 * 64
    assert Tiling((128, 128), (8, 200, 64)).granularity == 200 * 64


def test_a_piece_that_splits_a_block_is_refused() -> None:
    with pytest.raises(VescaleError, match=r"\(4, 6\) in blocks \(2, 4\): a piece of 8 elements is not n x 6"):
        Tiling((2, 4), (4, 6)).split(torch.zeros(8))


@pytest.mark.parametrize("block", [(), (0,), (2, 0), (1, 2, 3)], ids=str)
def test_block_shapes_have_one_or_two_positive_sizes(block: tuple[int, ...]) -> None:
    with pytest.raises(VescaleError, match="a block shape is"):
        Tiling(block, (4, 4))
