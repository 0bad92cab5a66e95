"""The results of benchmarks/planner.py as a table and two charts in docs/.

python benchmarks/planner_report.py
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from vescale_fsdp.picture.style import DPI, GREY, INK, PALETTE, new_figure, save

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "models" / "padding.csv"
TABLE = ROOT / "docs" / "planner_results.md"
CHART = ROOT / "docs" / "images" / "planner_padding.png"
REACHABLE_PCT = 3.0
"""Cells whose lower bound is above this have too few blocks for the ranks: no layout is good there."""

ROWS = ("1", "16", "32", "128")
LAYOUTS = {
    "default_pct": "ours (default)",
    "lanes_1_pct": "ours, one buffer",
    "paper_style_pct": "paper-style heuristic",
    "megatron_lcm_pct": "Megatron LCM",
    "fsdp2_even_blocks_pct": "FSDP2 even split, whole blocks",
    "fsdp2_stock_pct": "FSDP2 stock (cuts blocks)",
}
STYLES = {
    "default_pct": (PALETTE[0], "-", "o"),
    "paper_style_pct": (PALETTE[1], "-", "s"),
    "megatron_lcm_pct": (PALETTE[3], "-", "^"),
    "fsdp2_even_blocks_pct": (PALETTE[2], "-", "D"),
    "fsdp2_stock_pct": (PALETTE[4], "--", "v"),
    "any_layout_bound_pct": (GREY, ":", ""),
}
CHART_MODELS = ("llama3-70b", "gpt-oss-120b", "deepseek-v3-671b")
CHART_ROWS = ("1", "32", "128")
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
    for name, label in (("lanes_1_ms", "one buffer"), ("default_ms", "default"), ("lanes_3_ms", "up to three lanes")):
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

Planning a whole model, equal groups once:

{time_table(lines)}
"""
    )


def draw(lines: Sequence[Line]) -> None:
    width, height = 12.0, 8.6
    figure = new_figure(width, height)
    title = "Padding of the whole model against ranks, by rows per block"
    figure.text(0.012, 0.972, title, fontsize=12, weight="bold", color=INK)
    for down, rows in enumerate(CHART_ROWS):
        for across, model in enumerate(CHART_MODELS):
            box = (0.075 + across * 0.312, 0.705 - down * 0.277, 0.27, 0.208)
            axes = figure.add_axes(box)
            cells = [line for line in lines if line["model"] == model and line["rows"] == rows]
            for name, (colour, dash, marker) in STYLES.items():
                ranks = [int(cell["num_ranks"]) for cell in cells]
                values = [max(float(cell[name]), FLOOR_PCT) for cell in cells]
                axes.plot(ranks, values, color=colour, linestyle=dash, marker=marker, markersize=3.2, linewidth=1.3)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_ylim(FLOOR_PCT * 0.8, 1000)
            axes.set_xlim(0.9, 20000)
            axes.set_xticks([2**k for k in range(0, 15, 2)], [str(2**k) for k in range(0, 15, 2)])
            axes.set_yticks([0.01, 0.1, 1, 10, 100, 1000], ["<= 0.01 %", "0.1 %", "1 %", "10 %", "100 %", "1000 %"])
            axes.minorticks_off()
            axes.tick_params(labelsize=7.5, colors=INK, length=2.5)
            axes.grid(color="#E8E8E8", linewidth=0.6)
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            plural = "s" if rows != "1" else ""
            axes.set_title(f"{model}, {rows} row{plural}", fontsize=9.5, color=INK, loc="left", pad=4)
            if down == len(CHART_ROWS) - 1:
                axes.set_xlabel("ranks", fontsize=9, color=INK)
    _legend(figure)
    CHART.parent.mkdir(exist_ok=True)
    save(figure, CHART)
    print(f"{CHART}: {CHART.stat().st_size} bytes at {DPI} dpi")


def _legend(figure: object) -> None:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    assert isinstance(figure, Figure)
    names = {**LAYOUTS, "any_layout_bound_pct": "lower bound of any layout"}
    handles = [
        Line2D([], [], color=colour, linestyle=dash, marker=marker, markersize=4, linewidth=1.5, label=names[name])
        for name, (colour, dash, marker) in STYLES.items()
    ]
    figure.legend(handles=handles, loc="lower center", ncols=6, fontsize=8, frameon=False, labelcolor=INK)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    found = read()
    write_table(found)
    draw(found)
