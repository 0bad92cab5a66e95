"""docs/planner.md tells the truth: its commands print what it shows, its numbers are those of the planner."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from ragged_dtensor.granularity import Granularity
from vescale_fsdp.cli.app import app
from vescale_fsdp.planner import plan_group
from vescale_fsdp.spec import ParamSpec

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planner.md").read_text()
sys.path.append(str(ROOT / "benchmarks"))

from peer_layouts import Tensor, fsdp2_blocks  # noqa: E402


def commands() -> list[tuple[str, list[str]]]:
    """Each command of the page with the lines that it is shown to print."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ vescale-fsdp "), []))
            else:
                found[-1][1].append(line)
    return found


def same_words(shown: str, printed: str) -> bool:
    """`...` at the end of a line stands for its rest."""
    words, shortened = shown.removesuffix(" ...").split(), shown.endswith(" ...")
    return printed.split()[: len(words)] == words if shortened else printed.split() == words


@pytest.mark.parametrize(("command", "shown"), commands(), ids=[command for command, _ in commands()])
def test_a_command_prints_what_the_page_shows(
    command: str, shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(command))
    printed = iter(result.output.splitlines())
    for line in shown:
        if line != "...":
            assert any(same_words(line, candidate) for candidate in printed), f"{line!r} is not in\n{result.output}"
    assert result.exit_code == (2 if shown and shown[0].startswith("Error") else 0)


def test_the_number_that_is_worked_out() -> None:
    specs = [
        ParamSpec("w", (6, 8), "bfloat16", Granularity(16)),
        ParamSpec("v", (9, 8), "bfloat16", Granularity(8)),
        ParamSpec("b", (8,), "bfloat16"),
    ]
    plan = plan_group(specs, 4)
    assert (plan.share, plan.padding, [tensor.start for tensor in plan.tensors]) == (32, 0, [0, 48, 120])
    assert [len(plan.shard_range("v", rank)) for rank in range(4)] == [0, 16, 32, 24]
    assert fsdp2_blocks([Tensor(spec.shape, spec.granularity.numel) for spec in specs], 4, 8) == 48


def test_the_python_of_the_page_prints_what_its_comments_say(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"  # (.*)", code)


def test_every_picture_of_the_page_is_there_and_small() -> None:
    for name in re.findall(r"\]\((images/.*?)\)", PAGE + (ROOT / "docs" / "planner_results.md").read_text()):
        assert 0 < (ROOT / "docs" / name).stat().st_size < 200_000
