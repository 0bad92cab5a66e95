"""`vescale-fsdp plugins`: what is installed, what it asks of a model, and what is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner, Result

from vescale_fsdp import hookimpl
from vescale_fsdp import plugins as plugins_module
from vescale_fsdp.cli.app import app


def run(*args: object) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["plugins", *map(str, args)])


def lines_with(result: Result, word: str) -> list[list[str]]:
    return [line.split() for line in result.output.splitlines() if word in line.split()]


def test_formats_are_listed_with_distribution_block_bits_and_size() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    assert lines_with(result, "fp8_block") == [["fp8_block", "vescale-fp8-block", "128x128", "8", "float32", "1.0002"]]
    assert lines_with(result, "mxfp4") == [["mxfp4", "vescale-mx", "1x32", "4", "uint8", "0.5312"]]
    assert lines_with(result, "rows") == [["rows", "vescale-fsdp"]]


def test_what_a_format_asks_of_a_model_is_said_in_the_models_own_rows(tmp_path: Path) -> None:
    params = [["w1", [256, 96]], ["w2", [96, 256]], ["bias", [256]]]
    value = {"version": 1, "model": "tiny", "groups": [{"count": 3, "params": params}]}
    (tmp_path / "tiny.json").write_text(json.dumps(value))
    result = run(tmp_path / "tiny.json")
    assert result.exit_code == 0, result.output
    assert "what formats ask of tiny" in result.output
    assert any("128 rows" in line and " 3 " in line and "w1 256x96" in line for line in result.output.splitlines())


def test_a_model_that_is_not_there_is_one_line() -> None:
    result = run("nowhere.json")
    assert result.exit_code == 2
    assert "nowhere.json" in result.stderr


class Broken:
    @hookimpl
    def vescale_block_formats(self) -> list[object]:
        raise OSError("no licence")


@pytest.fixture
def broken_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plugins_module.Registry()
    made.broken.append("plugin of broken-dist: vescale_block_formats failed: OSError('no licence')")
    monkeypatch.setattr(plugins_module, "registry", lambda: made)


@pytest.mark.usefixtures("broken_registry")
def test_a_broken_plugin_is_listed_and_fails_the_command() -> None:
    result = run()
    assert result.exit_code == 1
    assert "broken: plugin of broken-dist: vescale_block_formats failed: OSError('no licence')" in result.output


def test_registering_a_broken_plugin_names_distribution_and_hook() -> None:
    with pytest.raises(ValueError, match=r"plugin of broken-dist: vescale_block_formats failed: .*no licence"):
        plugins_module.Registry().register(Broken(), distribution="broken-dist")
