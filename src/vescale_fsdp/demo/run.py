"""A whole run: start the ranks (or join torchrun's), train, and let rank 0 show and write the report."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from vescale_fsdp.checkpoint import check
from vescale_fsdp.demo.data import Corpus, find_files
from vescale_fsdp.demo.launch import launch, run_rank
from vescale_fsdp.demo.loop import train
from vescale_fsdp.demo.progress import show_progress
from vescale_fsdp.demo.report import draw_loss_curve, print_report, write_json
from vescale_fsdp.demo.settings import Settings
from vescale_fsdp.plugins import registry

__all__ = ["Run"]


@dataclass(frozen=True)
class Run:
    """`settings`, and where the results go: a folder `out` for the loss curve, a file `json` for the report as data."""

    settings: Settings
    out: Path
    json: Path | None = None

    def check(self) -> None:
        """Find before any process starts what would fail after minutes: ValueError or OSError says what it is."""
        Corpus.read(find_files(self.settings.data), self.settings.seq)
        for name in self.settings.formats:
            registry().format(name)
        if self.settings.resume:
            assert self.settings.checkpoint is not None
            check(self.settings.checkpoint)
        self.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.out):
            pass
        if self.json is not None:
            if self.json.is_dir():
                raise ValueError(f"--json {self.json} is a folder; name a file")
            with self.json.open("a"):
                pass

    def start(self) -> None:
        """Train on every rank; raises RankError if one fails."""
        if under_torchrun():
            run_rank(self.work)
        else:
            launch(self.work, self.settings.ranks)

    def work(self) -> None:
        """What every rank does; rank 0 also shows it."""
        import torch.distributed as dist

        corpus = Corpus.read(find_files(self.settings.data), self.settings.seq)
        if dist.get_rank():
            train(self.settings, corpus)
            return
        console = Console()
        self._announce(console, corpus)
        with show_progress(console, self.settings.steps) as watcher:
            outcome = train(self.settings, corpus, watcher)
        curve = draw_loss_curve(self.out / "loss.png", self.settings, outcome)
        print_report(console, self.settings, outcome, curve)
        if self.json is not None:
            write_json(self.json, self.settings, outcome)

    def _announce(self, console: Console, corpus: Corpus) -> None:
        s = self.settings
        source = s.data if s.data is not None else "the Python standard library"
        console.print(
            f"{len(corpus.train) / 1e6:.1f} MB of {source} to train on, {len(corpus.held_out) / 1e6:.1f} MB held out "
            f"({corpus.num_held_out} of {corpus.num_files} files); engine {s.engine}, {s.ranks} ranks, "
            f"{s.batch} x {s.seq} bytes a step",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
