"""The demo with `--gather-format` and `--optimizer adamw8bit`: losses, bytes, what the report says, bad input."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import RankPool, ranks
from typer.testing import CliRunner

from vescale_fsdp.cli.app import app
from vescale_fsdp.demo.data import Corpus
from vescale_fsdp.demo.loop import Outcome, Trainer
from vescale_fsdp.demo.settings import Dtype, OptimizerName, Settings

SMALL = Settings(ranks=1, steps=200, batch=4, seq=32, layers=1, dim=64, heads=2)
CORPUS = Corpus.read((Path(dataclasses.__file__), Path(argparse.__file__)), SMALL.seq)


def run(**changes: object) -> Outcome:
    trainer = Trainer(dataclasses.replace(SMALL, ranks=dist.get_world_size(), **changes), CORPUS)  # type: ignore[arg-type]
    for _ in trainer.steps():
        pass
    trainer.outcome.groups = trainer.engine.groups(trainer.model)
    return trainer.outcome


def last(outcome: Outcome) -> float:
    return sum(outcome.losses[-20:]) / 20


@ranks(2)
def test_after_200_steps_8_bit_adamw_is_within_1_percent_of_adamw() -> None:
    exact, near = run(), run(optimizer=OptimizerName.ADAMW8BIT)
    assert last(exact) < 0.6 * exact.losses[0]
    assert abs(last(near) - last(exact)) < 0.01 * last(exact)


@pytest.mark.exhaustive
@ranks(2)
def test_training_through_fp8_follows_bfloat16_and_mxfp4_trains() -> None:
    exact, near, coarse = (run(dtype=Dtype.BF16, gather_format=name) for name in (None, "fp8_block", "mxfp4"))
    assert abs(last(near) - last(exact)) < 0.03 * last(exact)
    assert last(coarse) < 0.7 * coarse.losses[0]


@ranks(2)
def test_both_together_train_and_the_report_names_who_asked_for_what() -> None:
    outcome = run(steps=4, optimizer=OptimizerName.ADAMW8BIT, gather_format="fp8_row")
    assert outcome.losses[-1] < outcome.losses[0]
    asked = " ".join(each for group in outcome.groups for each in group.asked)
    assert "(fp8_row by vescale-fp8-block)" in asked
    assert "(dynamic8_block by vescale-int8)" in asked


def save_losses(path: str) -> None:
    losses = run(steps=30, gather_format="mxfp8", optimizer=OptimizerName.ADAMW8BIT).losses
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(losses))


def test_losses_are_those_of_one_rank(rank_pool: RankPool, tmp_path: Path) -> None:
    found = []
    for num_ranks in (1, 2, 4):
        rank_pool.run(num_ranks, __file__, "save_losses", {"path": str(tmp_path / "losses.json")})
        found.append(json.loads((tmp_path / "losses.json").read_text()))
    for losses in found[1:]:
        assert losses[:3] == pytest.approx(found[0][:3], rel=1e-5)
        assert losses == pytest.approx(found[0], rel=2e-2)  # gradients are summed in another order, and codes are steps


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--gather-format", "fp9"], "no block format is named 'fp9'"),
        (["--gather-format", "mxfp8", "--engine", "fsdp2"], "--gather-format is for --engine vescale"),
        (["--optimizer", "adamw8bit", "--engine", "fsdp2"], "--optimizer adamw8bit needs blocks"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vescale_fsdp.demo.run.launch", lambda *_: pytest.fail("a process was started"))
    result = CliRunner().invoke(app, ["train", *arguments])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert text in result.stderr
