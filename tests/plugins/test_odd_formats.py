"""Formats as a third party may write them: odd but right ones work, wrong ones are named where they are found out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import ranks
from torch import nn

from vescale_fsdp import ParamPolicy, fully_shard, hookimpl
from vescale_fsdp.errors import PluginError
from vescale_fsdp.formats.block_format import BlockFormat, decode, encode, granularity_of
from vescale_fsdp.plugins import Registry, register, unregister


@dataclass(frozen=True)
class Steps:
    """Signed integers of `bits` bits, in blocks of any shape, with scales of any dtype."""

    name: str = "steps"
    block_shape: tuple[int, ...] = (3, 5)
    bits: int = 4
    scale_dtype: torch.dtype = torch.float16

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        most = 2 ** (self.bits - 1) - 1
        scales = (blocks.abs().amax(dim=1) / most).to(self.scale_dtype)
        steps = blocks / scales.float().clamp(min=1e-7).unsqueeze(1)
        return (steps.round().clamp(-most, most) + most).to(torch.uint8), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (codes.float() - (2 ** (self.bits - 1) - 1)) * scales.float().unsqueeze(1)


class Plugin:
    def __init__(self, *formats: Any) -> None:
        self.formats = formats

    @hookimpl
    def vescale_block_formats(self) -> list[BlockFormat]:
        return list(self.formats)


@contextmanager
def registered(*formats: Any) -> Iterator[None]:
    plugin = Plugin(*formats)
    register(plugin, distribution="odd-formats")
    try:
        yield
    finally:
        unregister(plugin)


ODD = [
    Steps("steps_3x5"),
    Steps("steps_7", (7,), 6, torch.bfloat16),
    Steps("steps_1x1", (1, 1), 8, torch.float32),
    Steps("steps_wide", (500, 3), 4, torch.float64),
]


@pytest.mark.parametrize("index", range(len(ODD)), ids=[format.name for format in ODD])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@ranks(2, 3)
def test_odd_blocks_narrow_codes_and_half_scales_gather_what_encoding_the_whole_gives(index: int, frozen: bool) -> None:
    format = ODD[index]
    torch.manual_seed(1)
    made = nn.ParameterDict(
        {"w": torch.randn(13, 11), "b": torch.randn(7), "one": torch.randn(1), "zero": torch.tensor(2.0)}
    )
    made["narrow"] = nn.Parameter(torch.randn(9, 6).bfloat16())
    made["none"] = nn.Parameter(torch.randn(0, 5))
    fulls = {name: param.detach().clone() for name, param in made.items()}
    for param in made.parameters():
        param.requires_grad_(not frozen)
    holder = nn.Module()
    holder.params = made
    with registered(format):
        fully_shard(holder, param_policy=lambda fqn, param: ParamPolicy(format=format.name))
    holder.unshard()
    for name, full in fulls.items():
        shape = tuple(full.shape)
        expected = decode(format, encode(format, full.flatten(), shape), shape, full.numel(), dtype=full.dtype)
        assert torch.equal(made[name].detach(), expected.view(shape)), name


@ranks(2)
def test_formats_mix_in_one_module() -> None:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24))
    chosen = {"0.weight": "steps_3x5", "1.weight": "steps_7", "1.bias": "steps_1x1"}
    with registered(*ODD):
        fully_shard(layers, param_policy=lambda fqn, param: ParamPolicy(format=chosen.get(fqn)))
    before = layers.state_dict()["0.weight"].full_tensor()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for _ in range(2):
        layers(torch.ones(2, 24)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(layers.state_dict()["0.weight"].full_tensor(), before)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bits": 5}, r"odd-formats: vescale_block_formats gave 'bad': codes have \[4, 6, 8\] bits, got 5"),
        ({"block_shape": (2, 0)}, r"gave 'bad': a block shape is .* got \(2, 0\)"),
        ({"block_shape": (2, 2, 2)}, "gave 'bad': a block shape is"),
        ({"block_shape": 32}, "odd-formats: vescale_block_formats gave 'bad'"),
        ({"scale_dtype": "float32"}, "scale_dtype is a torch.dtype of at most 8 bytes, got 'float32'"),
        ({"scale_dtype": torch.complex128}, "scale_dtype is a torch.dtype of at most 8 bytes"),
        ({"name": ""}, "whose name '' cannot be asked for"),
        ({"name": 3}, "whose name 3 cannot be asked for"),
    ],
    ids=str,
)
def test_what_a_format_says_of_itself_is_checked_when_it_registers(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        Registry().register(Plugin(Steps(**{"name": "bad", **wrong})), distribution="odd-formats")


def test_two_formats_of_one_plugin_with_one_name_are_refused() -> None:
    with pytest.raises(PluginError, match="'steps' is registered twice, by odd-formats and by odd-formats"):
        Registry().register(Plugin(Steps(), Steps(bits=8)), distribution="odd-formats")


class WrongCodes(Steps):
    def encode(self, blocks: torch.Tensor) -> Any:
        return blocks, torch.ones(len(blocks), dtype=self.scale_dtype)


class WrongScales(Steps):
    def encode(self, blocks: torch.Tensor) -> Any:
        return super().encode(blocks)[0], torch.ones(len(blocks), 1)


class Elsewhere(Steps):
    def encode(self, blocks: torch.Tensor) -> Any:
        return tuple(part.to("meta") for part in super().encode(blocks))


class Single(Steps):
    def encode(self, blocks: torch.Tensor) -> Any:
        return blocks


class WrongValues(Steps):
    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> Any:
        return super().decode(codes, scales).double()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WrongCodes, r"steps: expected the codes of encode as torch.uint8 \(4, 15\) on cpu, got torch.float32"),
        (
            WrongScales,
            r"steps: expected the scales of encode as torch.float16 \(4,\) on cpu, got torch.float32 \(4, 1\)",
        ),
        (Elsewhere, r"steps: expected the codes of encode .* on cpu, got torch.uint8 \(4, 15\) on meta"),
        (Single, r"steps: encode gives \(codes, scales\), got Tensor"),
        (
            WrongValues,
            r"steps: expected the result of decode as torch.float32 .*got torch.float64.*BlockFormatContract",
        ),
    ],
)
def test_a_format_that_breaks_its_promise_is_named(kind: type[Steps], message: str) -> None:
    format, values = kind(), torch.ones(6 * 10)
    with pytest.raises(PluginError, match=message):
        decode(format, encode(format, values, (6, 10)), (6, 10), 60)


def test_codes_that_share_a_byte_are_not_cut_apart() -> None:
    assert granularity_of(Steps(block_shape=(1, 5)), (4, 15)).numel == 10
