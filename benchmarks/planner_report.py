"""The results of benchmarks/planner.py as a table and two charts in docs/.

python benchmarks/planner_report.py
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vescale_fsdp.picture.style import GREY, INK, PALETTE, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "models" / "padding.csv"
TABLE = ROOT / "docs" / "planner_results.md"
CHART = ROOT / "docs" / "images" / "planner_padding.png"
REACHABLE_PCT = 3.0
"""Cells whose lower bound is above this have too few blocks for the ranks: no layout is good there."""

ROWS = ("1", "16", "32", "128")
LAYOUTS = {
    "lanes_3_pct": "ours, up to 3 lanes",
    "default_pct": "ours, default",
    "lanes_1_pct": "ours, one lane",
    "paper_style_pct": "paper-style",
    "megatron_lcm_pct": "Megatron LCM",
    "fsdp2_even_blocks_pct": "FSDP2, whole blocks",
    "fsdp2_stock_pct": "FSDP2 stock (cuts blocks)",
}
STYLES = {
    "megatron_lcm_pct": (PALETTE[3], "-", "^"),
    "fsdp2_even_blocks_pct": (PALETTE[2], "-", "D"),
    "fsdp2_stock_pct": (PALETTE[4], "--", "v"),
    "paper_style_pct": (PALETTE[1], "-", "s"),
    "default_pct": (PALETTE[0], "--", ""),
    "lanes_3_pct": (PALETTE[0], "-", "o"),
    "any_layout_bound_pct": (GREY, ":", ""),
}
CHART_MODELS = ("llama3-70b", "gpt-oss-120b", "deepseek-v3-671b")
CHART_ROWS = ("1", "32", "128")
FIRST_RANKS = 8
FLOOR_PCT = 0.01

Line = dict[str, str]


def read() -> list[Line]:
    with RESULTS.open() as file:
        return list(csv.DictReader(file))


def mean_table(lines: Sequence[Line]) -> str:
    """Mean padding over all models and rank counts, for cells that some layout can pad by at most 3 %."""
    columns = ["rows per block", "cells", *LAYOUTS.values(), "lower bound"]
    out = [_row(columns), _row(["---"] * len(columns))]
    for rows in (*ROWS, "muon"):
        cells = [x for x in lines if x["rows"] == rows and float(x["any_layout_bound_pct"]) <= REACHABLE_PCT]
        means = [statistics.fmean(float(cell[name]) for cell in cells) for name in (*LAYOUTS, "any_layout_bound_pct")]
        out.append(
            _row([rows if rows != "muon" else "whole matrices", str(len(cells)), *(f"{v:.2f} %" for v in means)])
        )
    return "\n".join(out)


def worst_table(lines: Sequence[Line]) -> str:
    """How often each layout pads at most 3 %, of the same cells."""
    columns = ["rows per block", *LAYOUTS.values()]
    out = [_row(columns), _row(["---"] * len(columns))]
    for rows in (*ROWS, "muon"):
        cells = [x for x in lines if x["rows"] == rows and float(x["any_layout_bound_pct"]) <= REACHABLE_PCT]
        shares = [sum(float(cell[name]) <= REACHABLE_PCT for cell in cells) / len(cells) for name in LAYOUTS]
        out.append(_row([rows if rows != "muon" else "whole matrices", *(f"{100 * share:.0f} %" for share in shares)]))
    return "\n".join(out)


def time_table(lines: Sequence[Line]) -> str:
    """Milliseconds to plan a whole model."""
    out = [_row(["milliseconds", "median", "99th percentile", "largest"]), _row(["---"] * 4)]
    for name, label in (("lanes_1_ms", "one lane"), ("default_ms", "default"), ("lanes_3_ms", "up to 3 lanes")):
        times = sorted(float(line[name]) for line in lines)
        at_99 = times[math.ceil(0.99 * len(times)) - 1]
        out.append(_row([label, *(f"{value:.2f}" for value in (statistics.median(times), at_99, times[-1]))]))
    return "\n".join(out)


def write_table(lines: Sequence[Line]) -> None:
    models = len({line["model"] for line in lines})
    TABLE.write_text(
        f"""# Planner results

Made by `benchmarks/planner.py` and `benchmarks/planner_report.py`: {models} models, {len(lines)} cells (model x rows
per block x ranks). What the layouts of other systems are is written down in `benchmarks/peer_layouts.py`.

![Padding against ranks]({CHART.relative_to(TABLE.parent)})

Mean padding where some layout pads at most {REACHABLE_PCT:g} %:

{mean_table(lines)}

Of the same cells, those that pad at most {REACHABLE_PCT:g} %:

{worst_table(lines)}

Planning a whole model, equal groups once, CPU time on one core:

{time_table(lines)}
"""
    )


def draw(lines: Sequence[Line]) -> None:
    width, height = 12.0, 8.6
    figure = new_figure(width, height)
    title = "Padding of the whole model against ranks (less than 0.01 % is drawn at 0.01 %)"
    figure.text(0.012, 0.972, title, fontsize=12, weight="bold", color=INK)
    for down, rows in enumerate(CHART_ROWS):
        for across, model in enumerate(CHART_MODELS):
            axes = figure.add_axes((0.065 + across * 0.318, 0.705 - down * 0.288, 0.262, 0.215))
            cells = [
                x for x in lines if (x["model"], x["rows"]) == (model, rows) and int(x["num_ranks"]) >= FIRST_RANKS
            ]
            _draw_cells(axes, cells, stock=rows == "1")
            axes.set_title(
                f"{model}, {rows} row{'' if rows == '1' else 's'}", fontsize=9.5, color=INK, loc="left", pad=4
            )
            if down == len(CHART_ROWS) - 1:
                axes.set_xlabel("ranks", fontsize=9, color=INK, labelpad=1)
    _legend(figure)
    CHART.parent.mkdir(exist_ok=True)
    save(figure, CHART)
    print(f"{CHART}: {CHART.stat().st_size} bytes")


def _draw_cells(axes: Axes, cells: Sequence[Line], *, stock: bool) -> None:
    """One model at one granularity. Stock FSDP2 knows none, so it is shown where any cut between rows will do."""
    ranks = [int(cell["num_ranks"]) for cell in cells]
    for name, (colour, dash, marker) in STYLES.items():
        if name != "fsdp2_stock_pct" or stock:
            values = [max(float(cell[name]), FLOOR_PCT) for cell in cells]
            axes.plot(ranks, values, color=colour, linestyle=dash, marker=marker, markersize=3.2, linewidth=1.4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(FLOOR_PCT * 0.8, 1000)
    axes.set_xlim(FIRST_RANKS / 1.1, 18000)
    ticks = [2**power for power in range(3, 15)]
    axes.set_xticks(ticks, [str(tick) if at % 2 else "" for at, tick in enumerate(ticks)])
    axes.set_yticks([0.01, 0.1, 1, 10, 100, 1000], ["0.01 %", "0.1 %", "1 %", "10 %", "100 %", "1000 %"])
    axes.minorticks_off()
    axes.tick_params(labelsize=7.5, colors=INK, length=2.5)
    axes.grid(color="#E8E8E8", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D

    names = {**LAYOUTS, "any_layout_bound_pct": "lower bound"}
    order = ("lanes_3_pct", "default_pct", *(name for name in STYLES if name not in ("lanes_3_pct", "default_pct")))
    handles = []
    for name in order:
        colour, dash, marker = STYLES[name]
        style = {"color": colour, "linestyle": dash, "marker": marker, "markersize": 4, "linewidth": 1.5}
        handles.append(Line2D([], [], label=names[name], **style))
    figure.legend(handles=handles, loc="lower center", ncols=7, fontsize=8, frameon=False, labelcolor=INK)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    found = read()
    write_table(found)
    draw(found)
