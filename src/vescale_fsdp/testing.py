"""Contract tests that any block format must pass: subclass, name the formats, run pytest.

    from vescale_fsdp.testing import BlockFormatContract

    class TestMyFormat(BlockFormatContract):
        formats = (MyFormat(),)
        largest_error: ClassVar = {"my_format": 1 / 254}    # of a block's largest magnitude

Every inherited test runs once per format. `sample` gives the values; override it where a format does not hold all
floats (such as one without a sign).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest
import torch

from .formats.block_format import BlockFormat, Encoded, decode, encode, granularity_of, payload_nbytes
from .formats.tiling import Tiling
from .plan import Span
from .planner import plan_group
from .spec import ParamSpec, alignment

__all__ = ["SHAPES", "WORLD_SIZES", "BlockFormatContract"]

WORLD_SIZES = (1, 2, 3, 4, 7)

SHAPES: Mapping[str, tuple[int, ...]] = {
    "scalar": (),
    "one row": (515,),
    "whole blocks": (256, 256),
    "short last rows": (300, 128),
    "short columns": (130, 70),
    "odd columns": (33, 5),
    "fewer rows than ranks": (2, 384),
    "experts of whole blocks": (4, 128, 64),
    "experts with short ends": (3, 50, 40),
    "convolution": (8, 3, 3, 3),
    "no elements": (0, 64),
}
"""One shape of each kind that a format meets in models."""


class BlockFormatContract:
    """What the planner, the runtime and optimizers rely on."""

    formats: ClassVar[Sequence[BlockFormat]]
    largest_error: ClassVar[Mapping[str, float]]
    """By name of format: largest |x - decode(encode(x))| of a block, in parts of its largest magnitude."""

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        if "format" in metafunc.fixturenames:
            metafunc.parametrize("format", cls.formats, ids=lambda format: str(format.name))
        if "shape" in metafunc.fixturenames:
            metafunc.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))

    def sample(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Values whose magnitudes differ from block to block and within a block; the same at every call."""
        generator = torch.Generator().manual_seed(sum(shape) + 1)
        values = torch.randn(shape, generator=generator)
        return values * torch.exp(3 * torch.randn(shape, generator=generator))

    def blocks(self, format: BlockFormat, num_blocks: int) -> torch.Tensor:
        return self.sample((num_blocks, math.prod(format.block_shape)))

    def test_says_what_it_is(self, format: BlockFormat) -> None:
        assert isinstance(format, BlockFormat)
        assert format.name
        assert isinstance(format.scale_dtype, torch.dtype)
        assert granularity_of(format, (64, 64)).reasons != ()
        assert format.name in self.largest_error, "state the error bound of every format"

    def test_encodes_blocks_to_uint8_codes_and_one_scale_each(self, format: BlockFormat) -> None:
        blocks = self.blocks(format, 5)
        codes, scales = format.encode(blocks)
        assert (codes.shape, codes.dtype) == (blocks.shape, torch.uint8)
        assert (scales.shape, scales.dtype) == ((5,), format.scale_dtype)
        assert int(codes.max()) < 2**format.bits

    def test_decodes_to_float32_blocks(self, format: BlockFormat) -> None:
        values = format.decode(*format.encode(self.blocks(format, 5)))
        assert (values.shape, values.dtype) == (self.blocks(format, 5).shape, torch.float32)

    def test_no_blocks_in_no_blocks_out(self, format: BlockFormat) -> None:
        codes, scales = format.encode(self.blocks(format, 0))
        assert codes.shape == (0, math.prod(format.block_shape))
        assert scales.shape == (0,)
        assert format.decode(codes, scales).shape == codes.shape

    def test_does_not_write_into_its_input(self, format: BlockFormat) -> None:
        blocks = self.blocks(format, 3)
        codes, scales = format.encode(blocks)
        assert torch.equal(blocks, self.blocks(format, 3))
        before = codes.clone(), scales.clone()
        format.decode(codes, scales)
        assert torch.equal(codes, before[0])
        assert torch.equal(_bits(scales), _bits(before[1]))

    def test_the_same_blocks_give_the_same_bits(self, format: BlockFormat) -> None:
        first, second = (format.encode(self.blocks(format, 4)) for _ in range(2))
        assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(first, second, strict=True))

    def test_blocks_do_not_see_each_other(self, format: BlockFormat) -> None:
        blocks = self.blocks(format, 6)
        codes, scales = format.encode(blocks)
        for i in range(6):
            alone_codes, alone_scales = format.encode(blocks[i : i + 1])
            assert torch.equal(alone_codes, codes[i : i + 1])
            assert torch.equal(_bits(alone_scales), _bits(scales[i : i + 1]))

    def test_zeros_decode_to_zeros(self, format: BlockFormat) -> None:
        values = format.decode(*format.encode(torch.zeros_like(self.blocks(format, 2))))
        assert torch.equal(values, torch.zeros_like(values))

    def test_very_small_and_very_large_blocks_stay_finite(self, format: BlockFormat) -> None:
        ones = self.sample((1, math.prod(format.block_shape))).sign().abs()
        blocks = torch.cat([ones * size for size in (1e-45, 1e-38, 1e-20, 1e20, 3e38)])
        values = format.decode(*format.encode(blocks))
        assert bool(values.isfinite().all())
        assert bool((values <= 2 * blocks).all())

    @pytest.mark.parametrize("bad", [math.inf, math.nan])
    def test_a_block_with_inf_or_nan_never_decodes_to_finite_values(self, format: BlockFormat, bad: float) -> None:
        blocks = self.blocks(format, 3)
        blocks[1, 0] = bad
        values = format.decode(*format.encode(blocks))
        assert not bool(values[1].isfinite().any())
        assert bool(values[[0, 2]].isfinite().all())

    def test_errors_stay_within_the_stated_bound(self, format: BlockFormat, shape: tuple[int, ...]) -> None:
        values = self.sample(shape).flatten()
        error = (_round_trip(format, values, shape) - values).abs()
        tiling = Tiling(format.block_shape, shape)
        magnitude = tiling.split(values).abs().amax(dim=1, keepdim=True)
        bound = magnitude * (self.largest_error[format.name] + 1e-6)  # what float32 itself rounds
        assert bool((tiling.split(error) <= bound).all())

    def test_bfloat16_encodes_like_the_same_values_in_float32(self, format: BlockFormat) -> None:
        values = self.sample((40, 64)).bfloat16().flatten()
        narrow, wide = encode(format, values, (40, 64)), encode(format, values.float(), (40, 64))
        assert _equal(narrow, wide)

    def test_takes_as_many_bytes_as_it_says(self, format: BlockFormat, shape: tuple[int, ...]) -> None:
        encoded = encode(format, self.sample(shape).flatten(), shape)
        assert encoded.payload.numel() == payload_nbytes(format, math.prod(shape))
        assert encoded.scales.numel() == Tiling(format.block_shape, shape).num_blocks

    def test_cut_then_encoded_equals_encoded_then_cut(self, format: BlockFormat, shape: tuple[int, ...]) -> None:
        values = self.sample(shape).flatten()
        whole, decoded = encode(format, values, shape), _round_trip(format, values, shape)
        for num_ranks in WORLD_SIZES:
            spans = _cuts(format, shape, num_ranks)
            pieces = [encode(format, values[span.begin : span.end], shape) for span in spans]
            payload = torch.cat([piece.payload for piece in pieces])
            scales = torch.cat([piece.scales for piece in pieces])
            assert _equal(Encoded(payload, scales), whole), f"{num_ranks} ranks own {spans}"
            parts = [decode(format, piece, shape, len(span)) for piece, span in zip(pieces, spans, strict=True)]
            assert torch.equal(torch.cat(parts), decoded), f"{num_ranks} ranks own {spans}"


def _cuts(format: BlockFormat, shape: tuple[int, ...], num_ranks: int) -> list[Span]:
    """What each rank owns of a tensor in a group of its own."""
    spec = ParamSpec("weight", shape, "float32", granularity_of(format, shape))
    unit = math.lcm(alignment(["float32"]), 128 // math.gcd(128, format.bits))
    plan = plan_group([spec], num_ranks, unit=unit, align=unit)
    return [plan.shard_range("weight", rank) for rank in range(num_ranks)]


def _round_trip(format: BlockFormat, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return decode(format, encode(format, values, shape), shape, values.numel())


def _equal(one: Encoded, two: Encoded) -> bool:
    return torch.equal(one.payload, two.payload) and torch.equal(_bits(one.scales), _bits(two.scales))


def _bits(values: torch.Tensor) -> torch.Tensor:
    """So that nan equals nan."""
    return values.contiguous().view(torch.uint8)
