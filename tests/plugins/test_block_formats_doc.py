"""docs/block-formats.md: its examples run."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import torch
from ranks import ranks
from torch import nn

from vescale_fsdp import ParamPolicy, fully_shard
from vescale_fsdp.formats.block_format import Encoded, decode
from vescale_fsdp.formats.encoded import EncodedTensor
from vescale_fsdp.plugins import registry

DOC = Path(__file__).parents[2] / "docs" / "block-formats.md"


def examples() -> list[str]:
    return [textwrap.dedent(text) for text in re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", DOC.read_text(), flags=re.M)]


def my_gemm(x: torch.Tensor, payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return x @ decode(registry().format("mxfp4"), Encoded(payload, scales), (64, 64), 64 * 64).view(64, 64).mT


@ranks(1)
def test_the_examples_run() -> None:
    layers = [nn.Linear(64, 64).requires_grad_(False) for _ in range(2)]
    names = {
        "fully_shard": fully_shard,
        "ParamPolicy": ParamPolicy,
        "nn": nn,
        "block": nn.Linear(64, 64),
        "model": SimpleNamespace(layers=layers),
        "my_gemm": my_gemm,
    }
    gathered, frozen, module = examples()
    for text in (gathered, frozen, module):
        exec(text, names)
    assert isinstance(layers[0].weight.to_local(), EncodedTensor)
    taker = names["BlockLinear"]()
    taker.weight = nn.Parameter(torch.randn(64, 64))
    expected = nn.Linear(64, 64, bias=False)
    expected.weight = nn.Parameter(taker.weight.detach().clone())
    for each in (taker, expected):
        fully_shard(each, param_policy=lambda fqn, param: ParamPolicy(format="mxfp4"))
    x = torch.ones(2, 64)
    assert torch.equal(taker(x), expected(x))
