"""`vescale-fsdp plan` and `advise`: numbers of the reference table, files they write, one line for bad input."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner, Result

from vescale_fsdp.cli.app import app

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
PNG = b"\x89PNG\r\n\x1a\n"
SAMPLE = [
    ("llama3-8b", "1", "6"),
    ("gpt-oss-20b", "16", "48"),
    ("gpt2-124m", "32", "7"),
    ("vit-l16", "1", "64"),
    ("gpt-oss-120b", "128", "512"),
    ("deepseek-v3-671b", "1", "64"),
]


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def report(tmp_path: Path, *args: object) -> dict[str, Any]:
    result = run(*args, "--json", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    return json.loads((tmp_path / "report.json").read_text())  # type: ignore[no-any-return]


def reference() -> dict[tuple[str, str, str], dict[str, str]]:
    with (MODELS / "reference_padding.csv").open() as file:
        return {(row["model"], row["rows"], row["num_ranks"]): row for row in csv.DictReader(file)}


@pytest.mark.parametrize(("model", "rows", "ranks"), SAMPLE)
def test_rows_mean_what_the_reference_table_means_by_them(tmp_path: Path, model: str, rows: str, ranks: str) -> None:
    made = report(tmp_path, "plan", MODELS / f"{model}.json", "--ranks", ranks, "--rows", rows, "--max-lanes", 1)
    expected = reference()[model, rows, ranks]
    assert made["padding_pct"] <= float(expected["reference_1_lane_pct"]) + 0.01
    assert made["bound_pct"] == pytest.approx(float(expected["any_layout_bound_pct"]), abs=0.01)
    assert 0 < made["seconds"] < 1


def tiny(tmp_path: Path) -> Path:
    params = [["layers.0.w", [6, 8]], ["layers.0.v", [3, 8]]]
    value = {"version": 1, "model": "tiny", "groups": [{"count": 2, "params": params}]}
    (tmp_path / "tiny.json").write_text(json.dumps(value))
    return tmp_path / "tiny.json"


def test_the_report_says_where_everything_starts(tmp_path: Path) -> None:
    made = report(tmp_path, "plan", tiny(tmp_path), "--ranks", 3, "--rows", 1)
    (group,) = made["groups"]
    assert (group["name"], group["count"], group["proved"], made["padding_pct"]) == ("layers.0-1", 2, True, 0.0)
    assert [lane["share"] for lane in group["lanes"]] == [24]  # 48 + 24 elements over three ranks
    assert {tensor["fqn"]: tensor["granularity"] for tensor in group["tensors"]} == {"layers.0.w": 8, "layers.0.v": 8}
    starts = {tensor["fqn"]: tensor["start"] for tensor in group["tensors"]}
    assert starts in ({"layers.0.w": 0, "layers.0.v": 48}, {"layers.0.w": 24, "layers.0.v": 0})


def test_explain_names_lanes_bounds_and_who_asked(tmp_path: Path) -> None:
    text = run("plan", tiny(tmp_path), "--ranks", 3, "--block", "*.w=2x2", "--explain").output
    assert "padding 33.3333 % (no layout below 0.0000 %)" in text  # 72 elements in shares of 32: 16 may not be cut
    assert "layers.0.w: 2x2 blocks (--block)" in text
    assert "2 groups are alike: layers.0-1" in text


def test_the_table_has_a_line_per_group_and_the_total(tmp_path: Path) -> None:
    lines = [line.split() for line in run("plan", tiny(tmp_path), "--ranks", 3).output.splitlines()]
    assert ["layers.0-1", "2", "2", "1", "48", "bytes", "0.0000", "0.0000", "yes"] in lines
    assert ["all", "2", "4", "96", "bytes", "0.0000", "0.0000", "yes"] in lines


def test_a_dtype_changes_bytes_and_alignment(tmp_path: Path) -> None:
    made = report(tmp_path, "plan", tiny(tmp_path), "--ranks", 3, "--dtype", "float8_e4m3fn")
    (group,) = made["groups"]
    assert (group["dtype"], group["share"]) == ("float8_e4m3fn", 32)  # shares of 16 bytes: 24 do not do


@pytest.mark.parametrize("ranks", [1, 8, 512])
def test_the_picture_is_a_png(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("matplotlib")
    result = run("plan", tiny(tmp_path), "--ranks", ranks, "--png", tmp_path / "plan.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plan.png").read_bytes().startswith(PNG)


def test_the_knee_of_gpt_oss_120b_in_128_row_blocks_is_384_ranks(tmp_path: Path) -> None:
    model = MODELS / "gpt-oss-120b.json"
    made = report(tmp_path, "advise", model, "--ranks", 1536, "--rows", 128, "--max-lanes", 1)
    padding = {split["shard_size"]: split["padding_pct"] for split in made["splits"]}
    assert made["knee"] == 384
    assert [round(padding[size], 1) for size in (384, 512, 768)] == [1.4, 5.8, 49.5]


def test_advice_is_printed_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("advise", tiny(tmp_path), "--ranks", 12, "--png", tmp_path / "advice.png")
    assert result.exit_code == 0, result.output
    # 72 elements a layer in shares of 16 bytes, 8 elements: 3 x 24 fits, 4 x 24 does not.
    assert "Knee: 3 ranks share the parameters at 0.00 % padding; 4 would pad 33.33 %." in result.output
    assert (tmp_path / "advice.png").read_bytes().startswith(PNG)


LLAMA = MODELS / "llama3-8b.json"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("plan", "missing.json", "--ranks", 8), "missing.json: no such file"),
        (("plan", LLAMA, "--ranks", 0), "--ranks: expected a whole number >= 1, got 0"),
        (("plan", LLAMA, "--ranks", -3), "--ranks: expected a whole number >= 1, got -3"),
        (("plan", LLAMA, "--ranks", "many"), "Invalid value for '--ranks'"),
        (("plan", LLAMA), "Missing option '--ranks'"),
        (("plan", LLAMA, "--ranks", 8, "--rows", "x"), "--rows x: expected a whole number >= 1"),
        (("plan", LLAMA, "--ranks", 8, "--block", "128"), "--block 128: expected NxM"),
        (("plan", LLAMA, "--ranks", 8, "--format", "fp9"), "--format fp9: no block format is named 'fp9'; there are"),
        (("plan", LLAMA, "--ranks", 8, "--max-lanes", 4), "--max-lanes: expected 1, 2 or 3, got 4"),
        (("plan", LLAMA, "--ranks", 8, "--dtype", "float9"), "unknown dtype 'float9'"),
        (("plan", LLAMA, "--ranks", 8, "--json", "no/such/folder/a.json"), "no/such/folder/a.json: No such file"),
        (("plan", LLAMA, "--ranks", 8, "--png", "no/such/folder/a.png"), "no/such/folder/a.png: No such file"),
        (("plan", LLAMA, "--ranks", 8, "--json", MODELS), f"{MODELS}: Is a directory"),
        (("plan", "torch.nn:Linear", "--ranks", 8), "torch.nn:Linear: TypeError"),
        (("plan", LLAMA, "--ranks", "8,x"), "Invalid value for '--ranks'"),
        (("plan", LLAMA, "--ranks", 1 << 21), "--ranks: expected at most 1,048,576, got 2,097,152"),
        (("advise", LLAMA, "--ranks", 10**20), "--ranks: expected at most 1,048,576, got 100,000"),
        (("plan", LLAMA, "--ranks", 8, "--json", "/dev/full"), "/dev/full: No space left on device"),
        (("advise", LLAMA, "--ranks", 1, "--json", "/dev/full"), "/dev/full: No space left on device"),
        (("plan", LLAMA, "--ranks", 8, "--rows", "none.*=2"), "--rows none.*=2: matches no parameter"),
        (("plan", LLAMA, "--ranks", 8, "--rows", "9" * 5000), "expected a whole number >= 1, got '999"),
        (("plan", LLAMA, "--ranks", 8, "--group-by", "none.*"), "group_by 'none.*': matches no module"),
        (("advise", LLAMA, "--ranks", 0), "--ranks: expected a whole number >= 1, got 0"),
        (("advise", LLAMA, "--ranks", 8, "--state-bytes", -1), "--state-bytes: expected a whole number >= 0, got -1"),
        (("advise", LLAMA, "--ranks", 8, "--max-padding", "nan"), "--max-padding: expected a percentage >= 0, got nan"),
        (("advise", "missing.json", "--ranks", 8), "missing.json: no such file"),
    ],
    ids=lambda value: " ".join(Path(str(arg)).name for arg in value[1:]) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(args: tuple[object, ...], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert message in line


@pytest.mark.parametrize("command", ["plan", "advise"])
def test_a_picture_without_matplotlib_says_what_to_install(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    result = run(command, tiny(tmp_path), "--ranks", 3, "--png", tmp_path / "a.png")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "a picture needs matplotlib. Run: pip install 'vescale-fsdp[viz]'" in result.stderr
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("command", ["plan", "advise"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "m.json",
            b'{"version": 1, "groups": [{"params": [["w", [4, -1]]]}]}',
            "groups[0].params[0] (w): shape: expected",
        ),
        ("m.json", b'{"version": 1, "groups": [{"params": [["w", [1]], ["w", [1]]]}]}', "w comes twice"),
        ("m.json", b'{"version": 3}', "version: expected 1, got 3"),
        ("m.safetensors", b"\x50\0\0\0\0\0\0\0{", "header: truncated; it needs 88 bytes, the file has 9"),
        ("m.safetensors", b"ab", "header: truncated; it needs"),
        ("m.safetensors", b"", "header: truncated; it needs 8 bytes, the file has 0"),
        ("m.safetensors", b"\x02\0\0\0\0\0\0\0[]", "header: expected {name: entry}, got []"),
        ("m.safetensors", b"\x02\0\0\0\0\0\0\0{}", "no parameters found"),
        ("m.safetensors", b'\x07\0\0\0\0\0\0\0{"a":1}', "a: no dtype or shape or data_offsets, got 1"),
        ("broken.py", b"def make(size): ...", "make() missing 1 required positional argument: 'size'"),
        ("broken.py", b"def make(): return 3", "the factory returned int, expected a torch.nn.Module"),
        ("broken.py", b"import torch; make = torch.nn.Module", "no parameters found"),
        ("broken.py", b"import sys; sys.exit('good bye')", "SystemExit: good bye"),
        (
            "broken.py",
            b"raise RuntimeError('first line' + chr(10) + 'second line')",
            "RuntimeError: first line second line",
        ),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value.split(":")[0],
)
def test_a_malformed_file_is_named_with_its_entry(
    command: str, name: str, content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    source = "broken:make" if name.endswith(".py") else name
    result = run(command, source, "--ranks", 8)
    (line,) = result.stderr.splitlines()
    assert (result.exit_code, line.startswith(f"Error: {source}: ")) == (2, True)
    assert message in line
