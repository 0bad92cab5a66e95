"""A sweep over shard-group sizes as a picture: padding, memory and traffic above one axis, the knee marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..advisor import Advice
from .style import DPI, GREY, INK, PALETTE, new_figure, save, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_advice"]

WIDTH, LEFT, RIGHT = 10.5, 0.9, 2.3
HEAD, PANEL, BETWEEN, FOOT = 0.75, 1.9, 0.5, 0.6
PADDING_TICKS = (0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10000, 100000)
LABEL_INCHES = 0.25
MARKERS = ("o", "s")

Lines = Sequence[tuple[str, Sequence[float]]]


def draw_advice(advice: Advice, file: Path) -> None:
    """Write a PNG of three panels."""
    height = HEAD + 3 * PANEL + 2 * BETWEEN + FOOT
    figure = new_figure(WIDTH, height)
    knee = advice.knee
    head = f"{advice.model} on {advice.num_ranks} ranks: shard over {knee.shard_size}, {knee.replicas} replicas"
    figure.text(0.12 / WIDTH, 1 - 0.3 / height, head, fontsize=12, color=INK, weight="bold")
    splits = advice.splits
    panels = [
        figure.add_axes(
            (
                LEFT / WIDTH,
                1 - (HEAD + PANEL + at * (PANEL + BETWEEN)) / height,
                1 - (LEFT + RIGHT) / WIDTH,
                PANEL / height,
            )
        )
        for at in range(3)
    ]
    _padding(panels[0], advice)
    _bytes(
        panels[1],
        advice,
        "memory per rank",
        [
            ("optimizer state", [split.state_bytes for split in splits]),
            ("parameters", [split.parameter_bytes for split in splits]),
        ],
    )
    _bytes(
        panels[2],
        advice,
        "traffic per rank",
        [
            ("one all-gather\nof all groups", [split.all_gather_bytes for split in splits]),
            ("all-reduce\nover replicas", [split.all_reduce_bytes for split in splits]),
        ],
    )
    for axes in panels:
        _shard_axis(axes, advice, labelled=axes is panels[-1])
    save(figure, file)


def _padding(axes: Axes, advice: Advice) -> None:
    sizes = [split.shard_size for split in advice.splits]
    padding = [split.padding_pct for split in advice.splits]
    bound = [split.bound_pct for split in advice.splits]
    axes.plot(sizes, bound, color=GREY, linestyle="--", linewidth=1.2, marker="s", markersize=3)
    axes.plot(sizes, padding, color=PALETTE[0], linewidth=1.6, marker="o", markersize=4)
    axes.axhline(advice.max_padding_pct, color=INK, linewidth=0.7, linestyle=":")
    axes.set_yscale("symlog", linthresh=1, linscale=0.6)
    top = max(*padding, advice.max_padding_pct) * 1.6
    ticks = [tick for tick in PADDING_TICKS if tick <= top]
    axes.set_ylim(-0.08, top)
    axes.set_yticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes.minorticks_off()
    axes.set_title("padding", fontsize=9.5, color=INK, loc="left", pad=4)
    knee = advice.knee.shard_size
    axes.text(knee, 1.02, f"knee: {knee}", fontsize=8.5, color=INK, ha="center", transform=axes.get_xaxis_transform())
    _end_labels(axes, sizes[-1], [("plan", padding[-1], PALETTE[0]), ("lower bound", bound[-1], GREY)])
    axes.text(
        sizes[0], advice.max_padding_pct, f"{advice.max_padding_pct:g} % accepted", fontsize=8, color=INK, va="bottom"
    )


def _bytes(axes: Axes, advice: Advice, title: str, lines: Lines) -> None:
    sizes = [split.shard_size for split in advice.splits]
    ends = []
    for (name, values), colour, marker in zip(lines, (PALETTE[5], PALETTE[2]), MARKERS, strict=True):
        shown = [value if value > 0 else math.nan for value in values]
        axes.plot(sizes, shown, color=colour, linewidth=1.6, marker=marker, markersize=4)
        last = max((at for at, value in enumerate(values) if value > 0), default=None)
        if last is not None:
            ends.append((name, values[last], colour))
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    exponents = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    step = max(1, len(exponents) // 5)
    ticks = [2.0**exponent for exponent in exponents[::step]]
    axes.set_yticks(ticks, [size_text(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_title(title, fontsize=9.5, color=INK, loc="left", pad=4)
    _end_labels(axes, sizes[-1], ends)


def _end_labels(axes: Axes, x: float, ends: Sequence[tuple[str, float, str]]) -> None:
    """Names beside the ends of the lines, pushed apart where they would touch."""
    height = axes.get_window_extent().height
    to_axes = axes.transData + axes.transAxes.inverted()
    placed = sorted(((to_axes.transform((x, value))[1], name, colour) for name, value, colour in ends), reverse=True)
    previous = math.inf
    for y, name, colour in placed:
        room = (16 + 12 * name.count("\n")) * DPI / 100 / height
        y = min(y, previous - room)
        previous = y
        axes.text(1.02, y, name, transform=axes.transAxes, fontsize=8.5, color=colour, va="center", weight="bold")


def _shard_axis(axes: Axes, advice: Advice, *, labelled: bool) -> None:
    sizes = [split.shard_size for split in advice.splits]
    axes.set_xscale("log", base=2)
    axes.set_xlim(sizes[0] / 1.1, sizes[-1] * 1.1)
    axes.minorticks_off()
    inches = WIDTH - LEFT - RIGHT
    octaves = max(math.log2(sizes[-1] * 1.21 / sizes[0]), 0.1)
    shown: list[int] = []
    knee = advice.knee.shard_size
    for size in [knee, *reversed(sizes)]:
        if all(abs(math.log2(size / other)) * inches / octaves >= LABEL_INCHES for other in shown):
            shown.append(size)
    axes.set_xticks(sorted(shown), [str(size) if labelled else "" for size in sorted(shown)])
    axes.axvline(knee, color=PALETTE[3], linewidth=6, alpha=0.3, zorder=0)
    if labelled:
        axes.set_xlabel("ranks that share the parameters (shard-group size)", fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=3)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
