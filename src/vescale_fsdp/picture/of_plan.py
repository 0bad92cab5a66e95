"""A plan as a picture: ranks downwards, bytes of their shares across, a colour per tensor, padding hatched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..model_plan import ModelPlan, PlannedGroup
from ..plan import GroupPlan
from ..spec import itemsize_bits
from .families import Family, families_of
from .geometry import rows
from .lane import draw_lane
from .style import INK, PADDING, new_figure, save, size_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_plan"]

MAX_GROUPS = 4

# Inches
WIDTH, LEGEND, LEFT, BETWEEN = 12.5, 3.6, 0.9, 0.95
HEAD, TITLE, AXIS, ROW, LEAST_ROWS = 0.6, 0.5, 0.75, 0.19, 9


def draw_plan(plan: ModelPlan, file: Path) -> None:
    """Write a PNG of the groups that hold most of the model, at most four; a row is a rank or ranks that look alike."""
    largest = sorted(plan.groups, key=lambda group: -group.plan.numel * group.count)[:MAX_GROUPS]
    shown = [group for group in plan.groups if group in largest and group.plan.share]
    heights = [_height(group.plan) for group in shown]
    figure = new_figure(WIDTH, HEAD + sum(heights))
    _head(figure, plan, left_out=len(plan.groups) - len(shown))
    top = HEAD
    for group, height in zip(shown, heights, strict=True):
        _draw_group(figure, group, top, height)
        top += height
    save(figure, file)


def _height(plan: GroupPlan) -> float:
    """Inches for one group: its title, rows and axis."""
    most = max(sum(row.height for row in rows(plan, lane)) for lane in range(len(plan.lanes)))
    return TITLE + ROW * max(most, LEAST_ROWS) + AXIS


def _head(figure: Figure, plan: ModelPlan, left_out: int) -> None:
    note = f"; {left_out} smaller groups not shown" if left_out else ""
    text = (
        f"{plan.shapes.model} over {plan.num_ranks} ranks: padding {plan.padding_pct:.2f} % "
        f"(no layout below {plan.bound_pct:.2f} %), {size_text(plan.nbytes)} per rank{note}"
    )
    figure.text(0.12 / WIDTH, 1 - 0.3 / figure.get_figheight(), text, fontsize=12, color=INK, weight="bold")


def _draw_group(figure: Figure, group: PlannedGroup, top: float, height: float) -> None:
    """`top` and `height` in inches from the figure's upper edge."""
    plan, full = group.plan, figure.get_figheight()
    families = families_of(plan, group.shapes.prefixes[0])
    times = f" x {group.count}" if group.count > 1 else ""
    each = " each" if group.count > 1 else ""
    title = f"{group.shapes.name}{times}: padding {plan.padding_pct:.2f} %, {size_text(plan.nbytes)} per rank{each}"
    figure.text(0.12 / WIDTH, 1 - (top + 0.1) / full, title, fontsize=10.5, color=INK)
    axes_height = height - TITLE - AXIS
    left = LEFT
    for lane, width in enumerate(_lane_widths(plan, WIDTH - LEGEND - LEFT)):
        bottom = full - top - TITLE - axes_height
        box = (left / WIDTH, bottom / full, width / WIDTH, axes_height / full)
        draw_lane(figure.add_axes(box), plan, lane, families)
        left += width + BETWEEN
    _draw_legend(figure, plan, families, 1 - (top + TITLE - 0.1) / full)


def _lane_widths(plan: GroupPlan, width: float) -> list[float]:
    """Inches: in proportion to the shares, but none so thin that its axis cannot be read."""
    room = width - BETWEEN * (len(plan.lanes) - 1)
    least = room * 0.2
    free = room - least * len(plan.lanes)
    return [least + free * lane.share / plan.share for lane in plan.lanes]


def _draw_legend(figure: Figure, plan: GroupPlan, families: Sequence[Family], top: float) -> None:
    from matplotlib.patches import Patch

    bytes_per = itemsize_bits(plan.dtype) / 8
    entries = [
        Patch(facecolor=family.colour, label=f"{family.label}  {size_text(family.numel * bytes_per)}")
        for family in families
    ]
    entries.append(Patch(**PADDING, label=f"padding  {size_text(plan.padding * bytes_per)}"))
    if any(spec.granularity.numel > 1 for spec in plan.specs):
        entries.append(Patch(alpha=0, label="thin white lines are block edges,\nwhere they lie far enough apart"))
    at = ((WIDTH - LEGEND + 0.3) / WIDTH, top)
    figure.legend(handles=entries, loc="upper left", bbox_to_anchor=at, fontsize=8, frameon=False, labelcolor=INK)
