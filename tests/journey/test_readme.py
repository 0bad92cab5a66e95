"""The README runs: its programs on three ranks, its plans to the last digit; its other commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from ranks import ranks
from typer.testing import CliRunner

from vescale_fsdp.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
CONSOLE = [text for language, text in BLOCKS if language == "console"]
COMMANDS = [line[2:] for text in CONSOLE for line in text.splitlines() if line.startswith("$ ")]


@ranks(3)
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_the_programs_run(number: int) -> None:
    exec(compile(PROGRAMS[number], f"README.md, program {number}", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("text", [text for text in CONSOLE if re.match(r"\$ vescale-fsdp (plan|advise)", text)])
def test_plans_print_what_the_readme_shows(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command, _, expected = text.partition("\n")
    result = CliRunner().invoke(app, shlex.split(command)[2:], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert comparable(result.output) == comparable(expected)


def comparable(text: str) -> list[str]:
    """Lines with a time in them differ from run to run."""
    return [line.rstrip() for line in text.splitlines() if line.strip() and not re.search(r"\d ms$", line.rstrip())]


@pytest.mark.parametrize("command", [command for command in COMMANDS if "vescale-fsdp train" in command])
def test_train_knows_the_flags(command: str) -> None:
    known = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert not [flag for flag in re.findall(r"(?<=\s)--[a-z-]+", command.partition("train")[2]) if flag not in known]


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_make_knows_the_targets(command: str) -> None:
    arguments = shlex.split(command, comments=True)[1:]
    done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_readme_shows_both_commands_first() -> None:
    assert COMMANDS[0].startswith("make train")
    assert COMMANDS[1].startswith("make test")
    assert len(PROGRAMS) >= 2
