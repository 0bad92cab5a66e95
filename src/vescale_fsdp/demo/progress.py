"""What rank 0 shows while it trains: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vescale_fsdp.demo.loop import Outcome, Watcher

__all__ = ["show_progress"]

NUM_PLAIN_LINES = 20


@contextmanager
def show_progress(console: Console, steps: int) -> Iterator[Watcher]:
    """Inside, `watcher.stepped(outcome)` updates the display."""
    if not console.is_terminal:
        yield _Lines(console, steps)
        return
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        yield _Bar(bar, steps)


class _Bar:
    def __init__(self, bar: Progress, steps: int) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=steps)

    def stepped(self, outcome: Outcome) -> None:
        self._bar.update(self._task, advance=1, description=_state(outcome))


class _Lines:
    """About `NUM_PLAIN_LINES` lines, the first and the last step among them."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps

    def stepped(self, outcome: Outcome) -> None:
        step = len(outcome.losses)
        if step in (1, self._steps) or step % max(1, self._steps // NUM_PLAIN_LINES) == 0:
            self._console.print(f"step {step}/{self._steps}  {_state(outcome)}", highlight=False)


def _state(outcome: Outcome) -> str:
    parts = [f"loss {outcome.losses[-1]:.4f}"]
    if outcome.tokens_per_s:
        parts.append(f"{outcome.tokens_per_s:,.0f} tokens/s")
    if outcome.peak_bytes:
        parts.append(f"peak {outcome.peak_bytes / 1e6:.1f} MB")
    return "  ".join(parts)
