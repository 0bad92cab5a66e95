"""`vescale-fsdp migrate --check`: both layouts side by side, and what of a program has to change."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner, Result

from vescale_fsdp.cli.app import app

PROGRAM = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(6, 8))
        self.v = nn.Parameter(torch.empty(3, 8))


def make():
    model = nn.Module()
    model.layers = nn.ModuleList(Layer() for _ in range(2))
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


def train(model):
    state = fully_shard.state(model)
    print(state._fsdp_param_group.fsdp_params, model.layers[0].w.placements[0] == Shard(0))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["migrate", *(str(arg) for arg in args)])


def test_padding_copies_and_peak_are_those_of_the_formulas(here: Path) -> None:
    (here / "padded.py").write_text(PROGRAM)
    result = run("--check", "padded:make", "--ranks", 4, "--json", "report.json")
    data = json.loads((here / "report.json").read_text())
    layers = next(group for group in data["groups"] if group["name"] == "layers.0-1")
    # 6 and 3 rows over 4 ranks: 2 and 1 rows of 8 elements each
    assert (layers["count"], layers["torch_share"], layers["our_share"]) == (2, 24, 20)
    root = next(group for group in data["groups"] if group["name"] == "root")
    assert (root["numel"], root["torch_share"]) == (1, 1)
    share = 4 * (2 * 24 + 1)
    assert data["peak_nbytes"]["torch"] == 4 * share + 3 * 4 * (4 * 24)
    copied = 2 * 4 * (2 * (24 + 4 * 24) + 4 * 24) + 4 * ((1 + 4) + 4)
    assert data["copied_nbytes_per_step"]["torch"] == copied
    assert f"{data['padding_pct']['torch']:.4f}" in result.output


def test_what_has_to_change_is_named_with_its_line(here: Path) -> None:
    (here / "private.py").write_text(PROGRAM)
    result = run("--check", "private:make", "--ranks", 2, "--json", "report.json")
    assert result.exit_code == 1
    lines = PROGRAM.splitlines()
    found = json.loads((here / "report.json").read_text())["findings"]
    for name, must_change in [
        ("fully_shard is torch's", True),
        ("_fsdp_param_group torch's private state", True),
        ("fsdp_params torch's private state", True),
        ("comparison with Shard", False),
        ("is a scalar", False),
    ]:
        (finding,) = [each for each in found if name in each["what"]]
        assert finding["must_change"] is must_change
        assert f"{'must change' if must_change else 'note'}: {finding['where']}" in result.output
        if at := re.fullmatch(r"private.py:(\d+)", finding["where"]):
            assert name.split()[0].strip(":") in lines[int(at[1]) - 1] or "Shard" in name
    assert {each["where"] for each in found if "scalar" in each["what"]} == {"scale"}


def test_a_program_with_nothing_to_change_ends_with_exit_code_0(here: Path) -> None:
    (here / "simple.py").write_text("from torch import nn\n\n\ndef make():\n    return nn.Linear(4, 4)\n")
    result = run("--check", "simple:make", "--ranks", 2)
    assert result.exit_code == 0, result.output
    assert "nothing in the program has to change" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--check"),
        (["--check", "no_such_module:make"], "No module named 'no_such_module'"),
        (["--check", "nonsense"], "expected package.module:factory, got 'nonsense'"),
        (["--check", "plain:missing"], "missing"),
        (["--check", "plain:text"], "object is not callable"),
        (["--check", "plain:make", "--ranks", "0"], "--ranks: expected a whole number >= 1, got 0"),
        (["--check", "plain:make", "--json", "no/such/folder.json"], "no/such/folder.json: No such file"),
        (["--check", "plain:make", "--max-lanes", "9"], "--max-lanes: expected 1, 2 or 3, got 9"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(here: Path, arguments: list[str], text: str) -> None:
    (here / "plain.py").write_text("from torch import nn\n\ntext = 'x'\n\n\ndef make():\n    return nn.Linear(4, 4)\n")
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert text in result.stderr
