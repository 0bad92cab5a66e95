"""`vescale-fsdp train --resume`: an interrupted run goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from vescale_fsdp.demo.data import Corpus
from vescale_fsdp.demo.loop import Trainer
from vescale_fsdp.demo.settings import EngineName, OptimizerName, Settings

TEXT = b"def f(x):\n    return x * 2 + 1\n\n" * 40
STEPS, DONE = 4, 2


def trainer(root: str, optimizer: str, engine: EngineName = EngineName.VESCALE, *, resume: bool = False) -> Trainer:
    settings = Settings(
        engine=engine,
        ranks=dist.get_world_size(),
        steps=STEPS,
        batch=12,
        seq=16,
        layers=1,
        dim=32,
        heads=2,
        tied=True,
        optimizer=OptimizerName(optimizer),
        checkpoint=Path(root),
        save_every=DONE,
        resume=resume,
    )
    return Trainer(settings, Corpus(TEXT, TEXT, 1, 0))


def run_through(root: str, optimizer: str) -> None:
    """The checkpoint is that of the middle: the one at the end goes elsewhere."""
    running = trainer(root, optimizer)
    for number, _ in enumerate(running.steps(), 1):
        if number == DONE:
            break
    uninterrupted = trainer(f"{root}-through", optimizer)
    for _ in uninterrupted.steps():
        pass
    if dist.get_rank() == 0:
        torch.save(uninterrupted.outcome.losses, f"{root}.losses")


def go_on(root: str, optimizer: str, world: int, engine: EngineName = EngineName.VESCALE) -> None:
    resumed = trainer(root, optimizer, engine, resume=True)
    assert len(resumed.outcome.losses) == DONE
    steps = iter(resumed.steps())
    next(steps)
    expected = torch.load(f"{root}.losses")
    found = resumed.outcome.losses
    if dist.get_world_size() == world:
        assert found == expected[: DONE + 1]
    else:
        torch.testing.assert_close(found, expected[: DONE + 1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_is_bit_identical_at_the_same_world_size_and_close_at_others(
    rank_pool: RankPool, tmp_path: Path, optimizer: str
) -> None:
    arguments = {"root": str(tmp_path / "checkpoint"), "optimizer": optimizer}
    rank_pool.run(2, __file__, "run_through", arguments)
    for world in [2, 3]:
        rank_pool.run(world, __file__, "go_on", {**arguments, "world": 2})


def test_another_engine_resumes_what_ours_saved(rank_pool: RankPool, tmp_path: Path) -> None:
    arguments = {"root": str(tmp_path / "checkpoint"), "optimizer": "adamw"}
    rank_pool.run(2, __file__, "run_through", arguments)
    rank_pool.run(3, __file__, "go_on", {**arguments, "world": 2, "engine": EngineName.FSDP2})


def test_flags_that_need_a_folder_say_so() -> None:
    with pytest.raises(ValueError, match="--resume needs --checkpoint"):
        Settings(resume=True)
    with pytest.raises(ValueError, match="--save-every needs --checkpoint"):
        Settings(save_every=2)
