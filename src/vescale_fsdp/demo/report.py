"""The end of a run, for a reader, as data, and as a picture of the loss curve."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vescale_fsdp.demo.loop import Outcome
from vescale_fsdp.demo.settings import Settings

__all__ = ["as_data", "draw_loss_curve", "print_report", "write_json"]


def as_data(settings: Settings, outcome: Outcome) -> dict[str, object]:
    """The report as JSON-ready values. `peak_bytes` and `wire_bytes_per_step` are defined in meter.py."""
    return {
        "engine": settings.engine.value,
        "ranks": settings.ranks,
        "seed": settings.seed,
        "losses": outcome.losses,
        "first_loss": outcome.losses[0],
        "last_loss": outcome.losses[-1],
        "val_bits_per_byte": outcome.val_bits_per_byte,
        "tokens_per_s": outcome.tokens_per_s,
        "peak_bytes": outcome.peak_bytes,
        "padding_pct": outcome.padding_pct,
        "collectives_per_step": sum(outcome.collectives.values()),
        "wire_bytes_per_step": outcome.wire_bytes,
        "collectives": outcome.collectives,
        "num_parameters": outcome.num_parameters,
        "groups": [
            {
                "name": group.name,
                "num_tensors": group.num_tensors,
                "numel": group.numel,
                "padding": group.padding,
                "nbytes_per_rank": group.nbytes_per_rank,
                "asked": group.asked,
            }
            for group in outcome.groups
        ],
        "sample": outcome.sample.decode(errors="replace"),
    }


def write_json(path: Path, settings: Settings, outcome: Outcome) -> None:
    path.write_text(json.dumps(as_data(settings, outcome), indent=1) + "\n")


def draw_loss_curve(path: Path, settings: Settings, outcome: Outcome) -> Path | None:
    """Write the PNG; None without the `viz` extra."""
    if find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([loss / math.log(2) for loss in outcome.losses], linewidth=1, label="train")
    axes.axhline(outcome.val_bits_per_byte, color="C1", linestyle="--", label="held-out files, after training")
    axes.set(xlabel="step", ylabel="bits per byte", title=f"engine {settings.engine}, {settings.ranks} ranks")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path


def print_report(console: Console, settings: Settings, outcome: Outcome, curve: Path | None) -> None:
    console.print()
    console.print(_group_table(outcome))
    calls = ", ".join(f"{count} {name.strip('_')}" for name, count in sorted(outcome.collectives.items()))
    rows = {
        "loss": f"{outcome.losses[0]:.4f} -> {outcome.losses[-1]:.4f} nats per byte in {settings.steps} steps",
        "held-out files": f"{outcome.val_bits_per_byte:.3f} bits per byte",
        "speed": f"{outcome.tokens_per_s:,.0f} tokens/s",
        "peak memory": f"{outcome.peak_bytes / 1e6:.1f} MB of tensors on the fullest rank",
        "a step moves": f"{outcome.wire_bytes / 1e6:.2f} MB sent per rank, in {calls or 'no collectives'}",
        "padding": f"{outcome.padding_pct:.2f} %",
        "kept whole": ", ".join(dict.fromkeys(each for group in outcome.groups for each in group.asked)) or "nothing",
        "loss curve": str(curve) if curve else "not drawn: pip install 'vescale-fsdp[viz]'",
    }
    for name, value in rows.items():
        console.print(Text.assemble((f"{name:<16}", "bold"), value), soft_wrap=True)
    console.print(Text("\na sample of what it writes now:", style="bold"))
    console.print(Text(outcome.sample.decode(errors="replace"), style="dim"))


def _group_table(outcome: Outcome) -> Table:
    table = Table(
        title=f"plan: {outcome.num_parameters:,} parameters in {len(outcome.groups)} groups", title_justify="left"
    )
    table.add_column("group")
    for heading in ("tensors", "elements", "bytes per rank", "padding %"):
        table.add_column(heading, justify="right")
    for group in outcome.groups:
        padding_pct = 100 * group.padding / group.numel
        cells = (f"{group.num_tensors}", f"{group.numel:,}", f"{group.nbytes_per_rank:,}", f"{padding_pct:.2f}")
        table.add_row(group.name, *cells)
    return table
