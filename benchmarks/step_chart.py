"""Steps of every engine over FSDP2's, as medians with their quartiles: a chart of what `step.py --json` wrote.

python benchmarks/step.py --quick --json step.json
python benchmarks/step_chart.py step.json docs/images/step.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vescale_fsdp.picture.style import GREY, INK, PALETTE, new_figure, save

ENGINES = ("fsdp1", "ours", "ours, flat", "ours, all")
MARKS = "sovD"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="what `step.py --json` wrote")
    parser.add_argument("png", type=Path)
    options = parser.parse_args()
    save(drawn(json.loads(options.report.read_text())), options.png)


def drawn(report: dict[str, Any]) -> Any:
    """A row for each case, a mark for each engine; lines reach from the lower to the upper quartile."""
    figure = new_figure(8.5, 0.9 + 0.95 * len(report))
    axes = figure.add_axes((0.27, 0.7 / (0.9 + 0.95 * len(report)), 0.7, 0.78))
    for row, case in enumerate(report.values()):
        for place, engine in enumerate(ENGINES):
            low, middle, high = case["engines"][engine]["ratio"]
            y = row + 0.2 * (place - 1.5)
            axes.plot([low, high], [y, y], color=PALETTE[place], linewidth=2.5, solid_capstyle="round")
            label = engine if row == 0 else None
            axes.plot(middle, y, MARKS[place], color=PALETTE[place], markeredgecolor="white", markersize=8, label=label)
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(range(len(report)), [f"{name}\n{case['ranks']} ranks" for name, case in report.items()])
    axes.set_ylim(len(report) - 0.5, -0.5)
    axes.margins(x=0.02)
    axes.set_xlabel("time of a step / FSDP2's in the same round")
    axes.grid(axis="x", color=GREY, alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(ENGINES), frameon=False)
    return figure


if __name__ == "__main__":
    main()
