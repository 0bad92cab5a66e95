"""docs/performance.md and docs/simulate.md tell the truth: their examples run, their figures are computed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from ranks import ranks

pytest.importorskip("typer")

from typer.testing import CliRunner

from vescale_fsdp.cli.app import app
from vescale_fsdp.shapes import read_shapes
from vescale_fsdp.simulate import FSDP2, OURS, Engine, Workload, memory_of

ROOT = Path(__file__).parents[2]
PERFORMANCE, SIMULATE = ((ROOT / "docs" / name).read_text() for name in ("performance.md", "simulate.md"))


@ranks(2)
def test_the_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", PERFORMANCE, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(example, {})


def test_the_simulate_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"```console\n\$ vescale-fsdp (.*?)\n```", SIMULATE, re.DOTALL)
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    assert "fsdp2 fits on 128 ranks; ! marks where it does not." in result.output


@pytest.mark.parametrize(("engine", "row"), [(FSDP2, "FSDP2, peak of a rank"), (OURS, "this engine |")])
def test_the_peaks_of_the_page_are_computed(engine: Engine, row: str) -> None:
    workload = Workload(read_shapes(str(ROOT / "benchmarks" / "models" / "gpt-oss-120b.json")), 1)
    shown = next(line for line in SIMULATE.splitlines() if row in line and "GiB" in line)
    peaks = [memory_of(engine, workload, engine.costs(workload, ranks)).peak / 2**30 for ranks in (128, 256)]
    assert [f"{peak:.1f} GiB" for peak in peaks] == re.findall(r"[\d.]+ GiB", shown)
