"""Wishes on the command line become granularities: numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vescale_fsdp.hookspecs import hookimpl
from vescale_fsdp.model_plan import plan_model
from vescale_fsdp.plugins import register, unregister
from vescale_fsdp.shapes import ModelShapes, ShapeGroup
from vescale_fsdp.spec import ParamSpec
from vescale_fsdp.wishes import Kind, WishError, grant, parse_wish


def granted(shape: tuple[int, ...], *wishes: tuple[Kind, str]) -> int:
    model = ModelShapes("m", "m", (ShapeGroup(("root",), (ParamSpec("w", shape),)),))
    (spec,) = grant(model, [parse_wish(kind, text) for kind, text in wishes]).specs
    return spec.granularity.numel


@pytest.mark.parametrize(
    ("shape", "rows", "expected"),
    [
        ((6, 5), "1", 5),
        ((6, 5), "4", 20),
        ((7,), "4", 4),
        ((), "4", 1),
        ((2, 6, 5), "4", 20),  # fused experts: a row is the last dim
        ((4, 3, 2, 2), "2", 24),  # a convolution: a row is one output channel
        ((6, 5), "whole", 30),
        ((0, 5), "4", 20),
        ((5, 0), "4", 1),
    ],
)
def test_rows(shape: tuple[int, ...], rows: str, expected: int) -> None:
    assert granted(shape, ("rows", rows)) == expected


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((256, 100), "128x128", 12800),
        ((300, 100), "128x128", 12800),  # the last block is short
        ((64,), "32x32", 1),  # without a pattern, blocks are for matrices
        ((64,), "w=32x32", 32),  # with one, a 1-D parameter is one row
        ((3, 256, 100), "128x128", 12800),
        ((3, 200, 100), "128x128", 20000),  # 200 rows do not split: the expert stays whole
    ],
)
def test_blocks(shape: tuple[int, ...], block: str, expected: int) -> None:
    assert granted(shape, ("block", block)) == expected


def test_rows_and_blocks_add_up_to_their_least_common_multiple() -> None:
    assert granted((60, 7), ("rows", "4"), ("block", "6x6")) == 12 * 7


def test_the_last_of_several_rows_that_match_counts() -> None:
    assert granted((60, 7), ("rows", "4"), ("rows", "w=6")) == 6 * 7


def two_layers() -> ModelShapes:
    return ModelShapes("m", "m", (ShapeGroup(("layers.0", "layers.1"), (ParamSpec("layers.0.w", (8, 3)),)),))


def test_a_wish_for_one_copy_makes_it_a_group_of_its_own() -> None:
    shapes = grant(two_layers(), [parse_wish("rows", "layers.1.*=2")])
    assert [(group.name, group.specs[0].granularity.numel) for group in shapes.groups] == [
        ("layers.0", 1),
        ("layers.1", 6),
    ]


def test_a_wish_for_all_copies_keeps_them_together() -> None:
    shapes = grant(two_layers(), [parse_wish("rows", "layers.*.w=2")])
    assert [(group.name, group.count) for group in shapes.groups] == [("layers.0-1", 2)]


def test_reasons_say_which_option_asked() -> None:
    shapes = grant(two_layers(), [parse_wish("rows", "2"), parse_wish("block", "4x4")])
    assert shapes.groups[0].specs[0].granularity.reasons == ("2 rows (--rows)", "4x4 blocks (--block)")


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("rows", "0", "--rows 0: expected a whole number >= 1, got '0'"),
        ("rows", "a=b=c", "--rows c: expected a whole number >= 1, got 'c'"),
        ("rows", "=3", "--rows =3: expected VALUE or PATTERN=VALUE"),
        ("rows", "", "--rows : expected a whole number"),
        ("block", "128", "--block 128: expected NxM, such as 128x128"),
        ("block", "128x", "--block 128x: expected a whole number >= 1, got ''"),
        ("block", "128x-1", "--block 128x-1: expected a whole number >= 1, got '-1'"),
        ("format", "no_such_format", "--format no_such_format: no block format is named"),
    ],
)
def test_a_wish_that_means_nothing_is_refused(kind: Kind, text: str, message: str) -> None:
    with pytest.raises(WishError, match=message):
        parse_wish(kind, text)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(WishError, match=r"--rows layer\.\*=2: matches no parameter; their names are like layers\.1\.w"):
        grant(two_layers(), [parse_wish("rows", "layer.*=2")])


class FourBits:
    """Codes of 4 bits in blocks of 32: shares of 16 bytes are 32 elements."""

    name, block_shape, bits, scale_dtype = "four", (32,), 4, torch.float32

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class FourBitsPlugin:
    @hookimpl
    def vescale_block_formats(self) -> list[FourBits]:
        return [FourBits()]


@pytest.fixture
def four_bits() -> Iterator[None]:
    plugin = FourBitsPlugin()
    register(plugin)
    yield
    unregister(plugin)


@pytest.mark.usefixtures("four_bits")
def test_a_format_asks_for_its_blocks_and_for_shares_that_its_codes_align() -> None:
    shapes = grant(two_layers(), [parse_wish("format", "layers.0.*=four")])
    assert [(g.name, g.unit, g.specs[0].granularity.numel) for g in shapes.groups] == [
        ("layers.0", 32, 32),
        ("layers.1", 4, 1),
    ]
    assert plan_model(shapes, 2).groups[0].plan.share == 32  # 24 elements on 2 ranks


@pytest.mark.usefixtures("four_bits")
def test_every_parameter_beside_codes_starts_where_they_align() -> None:
    specs = tuple(ParamSpec(f"p{at}", (8, 1)) for at in range(3))
    shapes = grant(ModelShapes("m", "m", (ShapeGroup(("root",), specs),)), [parse_wish("format", "p1=four")])
    (group,) = plan_model(shapes, 1).groups
    assert sorted(tensor.start for tensor in group.plan.tensors) == [0, 32, 64]
