"""docs/optimizers.md tells the truth: its code runs as it stands, on two ranks."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import torch
from ranks import ranks
from torch import nn
from torch.distributed.tensor import DTensor

PAGE = (Path(__file__).parents[3] / "docs" / "optimizers.md").read_text()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(2))
        self.head = nn.Linear(6, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def blocks() -> list[str]:
    """Code that stands on its own lines, indented, in the order of the page."""
    found = re.findall(r"(?:^ {4,}\S.*\n(?:\n(?= {4}))?)+", PAGE, re.MULTILINE)
    return [code for code in map(textwrap.dedent, found) if re.search(r"^(from|import) ", code, re.MULTILINE)]


@ranks(2)
def test_the_code_of_the_page_runs_from_top_to_bottom() -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {"model": Model()}
    assert len(blocks()) == 4
    for code in blocks():
        if "whole_matrices" in code:
            names["block"] = nn.Linear(6, 6)
        exec(compile(code, "docs/optimizers.md", "exec"), names)
        if "optimizer = " in code:
            names["model"](torch.arange(8)).square().sum().backward()
            names["optimizer"].step()
    for block in names["model"].blocks:
        for param in block.parameters():
            assert isinstance(param, DTensor)
            assert param.ndim != 2 or torch.linalg.matrix_norm(param.full_tensor(), ord=2) < 1 + 1e-5


@ranks(2)
def test_lend_clips_what_was_too_large() -> None:
    names: dict[str, Any] = {"model": Model()}
    setup, *_, clip = blocks()
    exec(setup, names)
    for param in names["model"].parameters():
        param.data.mul_(100)
    exec(clip, names)
    for param in names["hidden"]:
        torch.testing.assert_close(torch.linalg.matrix_norm(param.full_tensor(), ord=2), torch.tensor(1.0))
