"""`vescale-fsdp train` as a user meets it: bad input in one line, a failing rank named, one real run."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from failing_rank import fail_on_rank
from typer.testing import CliRunner

from vescale_fsdp.cli.app import app
from vescale_fsdp.demo.data import Corpus, find_files
from vescale_fsdp.demo.launch import RankError, launch

SMALL = ["--steps", "4", "--batch", "4", "--seq", "16", "--layers", "1", "--dim", "16", "--heads", "2"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--data", "no/such/path"], "no/such/path: no such file or folder"),
        (["--data", "empty"], "not one byte in them"),
        (["--data", "short"], "the data is too small: 9 bytes to train on and 1 held out, but --seq 128 needs 129"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--ranks", "3"], "--batch 16 does not divide over 3 ranks; try --batch 18"),
        (["--engine", "zero"], "'zero' is not one of 'vescale', 'fsdp2', 'ddp', 'single'"),
        (["--dtype", "fp8"], "'fp8' is not one of 'fp32', 'bf16'"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--steps", "many"], "--steps"),
        (["--heads", "3"], "--dim 256 does not split into --heads 3"),
        (["--lr", "0"], "--lr must be a positive number"),
        (["--lr", "nan"], "--lr must be a positive number"),
        (["--out", "short/out"], "short/out: Not a directory"),
        (["--json", "missing/report.json"], "missing/report.json: No such file or directory"),
        (["--json", "empty"], "--json empty is a folder"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vescale_fsdp.demo.run.launch", lambda *_: pytest.fail("a process was started"))
    Path("empty").mkdir()
    Path("short").write_bytes(b"0123456789")
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("Error: ")
    assert text in result.stderr


def test_torchrun_and_ranks_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["train", "--ranks", "4"])
    assert (result.exit_code, result.stderr) == (2, "Error: --ranks 4, but torchrun started 2; leave --ranks out\n")


def test_without_the_cli_extra_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vescale_fsdp import cli

    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err == "Error: typer and rich not installed. Run: pip install 'vescale-fsdp[cli]'\n"


def test_held_out_bytes_are_whole_files_that_training_never_sees(tmp_path: Path) -> None:
    for letter in "abcdefghijklmnopqrst":
        (tmp_path / letter).write_text(letter * 50)
    (tmp_path / ".hidden").write_text("?" * 50)
    corpus = Corpus.read(find_files(tmp_path), seq=16)
    assert (corpus.num_files, corpus.num_held_out) == (20, 2)
    assert (len(corpus.train), len(corpus.held_out)) == (900, 100)
    assert not set(corpus.train) & set(corpus.held_out)
    assert b"?" not in corpus.train + corpus.held_out


def test_a_batch_is_the_same_for_any_number_of_ranks_and_differs_by_step_and_seed(tmp_path: Path) -> None:
    corpus = Corpus(bytes(range(256)) * 4, b"x" * 100, 1, 0)
    batches = [corpus.batch(step, batch=8, seq=16, seed=seed) for step, seed in ((0, 0), (0, 0), (1, 0), (0, 1))]
    assert batches[0].equal(batches[1])
    assert not batches[0].equal(batches[2])
    assert not batches[0].equal(batches[3])
    assert ((batches[0][:, 1:] - batches[0][:, :-1]) % 256 == 1).all()


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("how", "text"),
    [("raised", "rank 1 failed: ValueError: rank one says no"), ("killed", "rank 1 was killed by SIGKILL")],
)
def test_a_failing_rank_is_named_and_the_others_end(how: str, text: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError, match=text):
        launch(partial(fail_on_rank, 1, how), 3)
    assert time.monotonic() - start_s < 60
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("rank ")]


KEYS = {
    *("losses", "first_loss", "last_loss", "val_bits_per_byte", "tokens_per_s", "peak_bytes", "padding_pct"),
    *("collectives_per_step", "wire_bytes_per_step", "engine", "ranks", "seed"),
}


@pytest.mark.subprocess
def test_a_run_ends_with_a_report_for_people_and_one_for_programs(tmp_path: Path) -> None:
    shown = run_command("--out", tmp_path / "out", "--json", tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert set(data) >= KEYS
    assert (data["engine"], data["ranks"], data["seed"], len(data["losses"])) == ("vescale", 4, 0, 4)
    assert (data["first_loss"], data["last_loss"]) == (data["losses"][0], data["losses"][-1])
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    for text in ("step 4/4", "bits per byte", "tokens/s", "padding", "a step moves", "blocks.0", "loss.png"):
        assert text in shown


@pytest.mark.subprocess
def test_under_torchrun_the_command_uses_its_ranks(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    shown = run_command("--out", tmp_path, "--json", tmp_path / "report.json", launcher=[sys.executable, *torchrun])
    assert shown.count("held-out files") == 1
    assert json.loads((tmp_path / "report.json").read_text())["ranks"] == 2


def run_command(*arguments: str | Path, launcher: Sequence[str] = ()) -> str:
    """What the command prints; it must succeed."""
    command = [*launcher, Path(sys.executable).parent / "vescale-fsdp", "train", *SMALL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
