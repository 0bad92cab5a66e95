"""A third party's format and constraint, and a program that uses them; checked by mypy --strict and never run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, assert_type

import torch
from torch import nn

from vescale_fsdp import BlockFormat, ParamPolicy, fully_shard, hookimpl
from vescale_fsdp.formats import Encoded, decode, encode
from vescale_fsdp.hookspecs import LayoutConstraint
from vescale_fsdp.optim import AdamW8bit
from vescale_fsdp.plugins import register, registry
from vescale_fsdp.testing import BlockFormatContract


@dataclass(frozen=True)
class Halves:
    """bfloat16's upper byte, without a scale worth the name."""

    name: str = "halves"
    block_shape: tuple[int, ...] = (64,)
    bits: int = 8
    scale_dtype: torch.dtype = torch.float32

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = (blocks.bfloat16().view(torch.int16) >> 8).to(torch.uint8)
        return codes, torch.ones(len(blocks))

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (codes.to(torch.int16) << 8).view(torch.bfloat16).float() * scales.unsqueeze(1)


class Pairs:
    name = "pairs"

    def numel(self, shape: tuple[int, ...], size: tuple[int, ...]) -> int:
        return 2


class Plugin:
    @hookimpl
    def vescale_block_formats(self) -> Iterable[BlockFormat]:
        return [Halves()]

    @hookimpl
    def vescale_layout_constraints(self) -> Iterable[LayoutConstraint]:
        return [Pairs()]


class TestHalves(BlockFormatContract):
    formats = (Halves(),)
    largest_error: ClassVar = {"halves": 1.0}


def train(model: nn.Module, weight: torch.Tensor) -> None:
    register(Plugin(), distribution="notebook")
    assert_type(registry().format("halves"), BlockFormat)
    encoded = encode(Halves(), weight.flatten(), tuple(weight.shape))
    assert_type(encoded, Encoded)
    decode(Halves(), encoded, tuple(weight.shape), weight.numel(), dtype=torch.bfloat16)
    fully_shard(model, param_policy=lambda fqn, param: ParamPolicy(format="halves", optimizer="pairs"))
    fully_shard(model, param_policy=AdamW8bit.policy)
    optimizer = AdamW8bit(model.named_parameters(), lr=1e-3, state_format=Halves(), root_format=Halves())
    optimizer.step()
