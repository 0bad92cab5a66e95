"""A module that computes with codes and scales of its weight; checked by mypy --strict and never run."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn

from vescale_fsdp import BlockFormat, ParamPolicy, fully_shard
from vescale_fsdp.formats import EncodedTensor, TakesEncoded, takes_encoded


class BlockLinear(nn.Module):
    encoded_params: frozenset[str] = frozenset({"weight"})

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, EncodedTensor):
            assert_type(self.weight.payload, torch.Tensor)
            assert_type(self.weight.scales, torch.Tensor)
            assert_type(self.weight.format, BlockFormat)
            return x @ self.weight.decode(torch.bfloat16).mT
        return x @ self.weight.mT


taker: TakesEncoded = BlockLinear()
assert_type(takes_encoded(BlockLinear(), "weight"), bool)
fully_shard(BlockLinear(), param_policy=lambda fqn, param: ParamPolicy(format="mxfp4"))
