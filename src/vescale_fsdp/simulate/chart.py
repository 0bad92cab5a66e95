"""Weak, strong and model scaling side by side: throughput above, peak memory below, one colour per engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..picture.style import GREY, INK, PALETTE, new_figure, save
from .scaling import Point, Scaling

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_scaling"]

WIDTH, HEIGHT = 12.0, 6.4
GIB = 2**30


def draw_scaling(scaling: Scaling, file: Path) -> None:
    """Write a PNG of two rows of three panels."""
    figure = new_figure(WIDTH, HEIGHT)
    figure.text(
        0.01, 0.96, f"{scaling.model} on {scaling.machine.name}, simulated", fontsize=12, color=INK, weight="bold"
    )
    axes = figure.subplots(2, 3)
    figure.subplots_adjust(left=0.07, right=0.98, top=0.88, bottom=0.09, wspace=0.26, hspace=0.3)
    columns: tuple[tuple[str, Sequence[Point], Callable[[Point], float], str], ...] = (
        ("weak scaling: tokens per rank stay", scaling.weak, lambda point: point.num_ranks, "ranks"),
        ("strong scaling: tokens in all stay", scaling.strong, lambda point: point.num_ranks, "ranks"),
        ("model scaling: more layers", scaling.model_sizes, lambda point: point.parameters / 1e9, "10^9 parameters"),
    )
    for at, (title, points, place, label) in enumerate(columns):
        _panel(axes[0, at], points, place, lambda point: 100 * point.time.mfu, title)
        _panel(axes[1, at], points, place, lambda point: point.memory.peak / GIB, "")
        usable = (scaling.machine.memory_bytes - scaling.machine.reserved_bytes) / GIB
        axes[1, at].axhline(usable, color=GREY, linestyle="--", linewidth=1)
        axes[1, at].set_yscale("log")
        axes[1, at].set_xlabel(label, fontsize=8.5, color=INK)
    axes[0, 0].set_ylabel("MFU, %", fontsize=8.5, color=INK)
    axes[1, 0].set_ylabel("peak of a rank, GiB (dashed: usable)", fontsize=8.5, color=INK)
    axes[0, 0].legend(fontsize=8, frameon=False)
    save(figure, file)


def _panel(
    axes: Axes,
    points: Sequence[Point],
    place: Callable[[Point], float],
    height: Callable[[Point], float],
    title: str,
) -> None:
    """A line per engine; hollow where a rank has too little memory."""
    for colour, name in zip(PALETTE, dict.fromkeys(point.engine for point in points), strict=False):
        own = [point for point in points if point.engine == name]
        axes.plot([place(p) for p in own], [height(p) for p in own], color=colour, linewidth=1.6, label=name)
        for point in own:
            face = colour if point.fits else "white"
            axes.plot([place(point)], [height(point)], color=colour, marker="o", markersize=5, markerfacecolor=face)
    axes.set_xscale("log", base=2)
    axes.set_title(title, fontsize=9.5, color=INK, loc="left", pad=4)
    axes.tick_params(labelsize=8, colors=INK, length=3)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
