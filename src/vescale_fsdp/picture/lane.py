"""One lane of a plan in one pair of matplotlib axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..plan import GroupPlan, Span, TensorPlan
from ..spec import itemsize_bits
from .families import Family
from .geometry import Piece, Row, block_edges, gaps, pieces, rows
from .style import INK, PADDING, byte_unit, darker, ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_lane"]

PIXELS_PER_EDGE = 4
PIXELS_PER_LETTER = 6.4
AIR = 0.1
"""Of a row of one rank, above and below its bar."""


def draw_lane(axes: Axes, plan: GroupPlan, lane: int, families: Sequence[Family]) -> None:
    """Bars for all ranks; rows of alike ranks are higher, slowly growing with their number."""
    canvas = _Canvas(axes, plan, lane)
    for gap in gaps(plan, lane):
        canvas.padding(gap)
    for family in families:
        for number, tensor in enumerate(t for t in family.tensors if t.lane == lane):
            canvas.tensor(tensor, family.short_name(tensor), darker(family.colour) if number % 2 else family.colour)
    canvas.mixed_rows(families, list(gaps(plan, lane)))
    canvas.finish()


class _Canvas:
    """Turns (elements of a share, ranks) into the axes' coordinates, and draws there."""

    def __init__(self, axes: Axes, plan: GroupPlan, lane: int) -> None:
        self.axes, self.lane, self.lanes = axes, lane, len(plan.lanes)
        self.share = plan.lanes[lane].share
        bytes_per = itemsize_bits(plan.dtype) / 8
        self.unit, size = byte_unit(self.share * bytes_per)
        self.scale = bytes_per / size
        self.rows = rows(plan, lane)
        self.tops = [0.0]
        for row in self.rows:
            self.tops.append(self.tops[-1] + row.height)
        extent = axes.get_window_extent()
        self.element_px, self.row_px = extent.width / self.share, extent.height / self.tops[-1]

    def tensor(self, tensor: TensorPlan, name: str, colour: str) -> None:
        parts = list(pieces(Span(tensor.start, tensor.start + tensor.spec.numel), self.share))
        for piece in parts:
            for top, bottom in self._bars(piece):
                self._rectangle(
                    piece.left, piece.right, top, bottom, facecolor=colour, edgecolor="white", linewidth=0.4
                )
        if tensor.spec.granularity.numel * self.element_px >= PIXELS_PER_EDGE:
            self._edges(tensor)
        self._name(parts, name, colour)

    def padding(self, gap: Span) -> None:
        for piece in pieces(gap, self.share):
            for top, bottom in self._bars(piece):
                self._rectangle(piece.left, piece.right, top, bottom, **PADDING)

    def mixed_rows(self, families: Sequence[Family], empty: Sequence[Span]) -> None:
        """What ranks that are not drawn one by one hold together, as parts of an average share."""
        for index, row in enumerate(self.rows):
            if row.mixed:
                left = 0.0
                top, bottom = self.tops[index] + AIR, self.tops[index + 1] - AIR
                for family in families:
                    right = left + self._average(row, [_span(t) for t in family.tensors if t.lane == self.lane])
                    style = {"facecolor": family.colour, "edgecolor": "white", "linewidth": 0.4, "alpha": 0.75}
                    self._rectangle(left, right, top, bottom, **style)
                    left = right
                self._rectangle(left, left + self._average(row, empty), top, bottom, **PADDING)
                text = f"ranks {row.label}: the sum of {row.ranks} ranks"
                self._text(self.share / 2, (top + bottom) / 2, text, "white", INK)

    def finish(self) -> None:
        axes = self.axes
        axes.set_xlim(0, self.share * self.scale)
        axes.set_ylim(self.tops[-1], 0)
        axes.set_xlabel(f"{self.unit} of a rank's share", fontsize=9, color=INK)
        middles = [(self.tops[index] + self.tops[index + 1]) / 2 for index in range(len(self.rows))]
        axes.set_yticks(middles, [row.label for row in self.rows])
        title = "rank" if self.lanes == 1 else f"rank          lane {self.lane}"
        axes.set_title(title, fontsize=8.5, color=INK, loc="left", pad=2, x=-28 / axes.get_window_extent().width)
        axes.tick_params(labelsize=7.5, colors=INK, length=2)
        axes.locator_params(axis="x", nbins=max(2, int(axes.get_window_extent().width / 70)))
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)

    def _edges(self, tensor: TensorPlan) -> None:
        from matplotlib.collections import LineCollection

        lines = [
            ((edge.left * self.scale, top), (edge.left * self.scale, bottom))
            for edge in block_edges(tensor, self.share)
            for top, bottom in self._bars(edge)
        ]
        self.axes.add_collection(LineCollection(lines, colors="white", linewidths=0.6, alpha=0.8))

    def _bars(self, piece: Piece) -> Iterator[tuple[float, float]]:
        for index, row in enumerate(self.rows):
            if not row.mixed and piece.top < row.end and row.first < piece.bottom:
                yield self.tops[index] + AIR, self.tops[index + 1] - AIR

    def _rectangle(self, left: float, right: float, top: float, bottom: float, **style: Any) -> None:
        from matplotlib.patches import Rectangle

        corner = (left * self.scale, top)
        self.axes.add_patch(Rectangle(corner, (right - left) * self.scale, bottom - top, **style))

    def _name(self, parts: Sequence[Piece], name: str, colour: str) -> None:
        """The tensor's name, or its last part, in its largest bar if it fits there."""
        bars = [(p.right - p.left, top, bottom) for p in parts for top, bottom in self._bars(p)]
        width, top, bottom = max(bars, key=lambda bar: (bar[0] * (bar[2] - bar[1]), -bar[1]), default=(0, 0, 0))
        letters = (width * self.element_px - 8) / PIXELS_PER_LETTER
        name = name if len(name) <= letters else _last_part(name)
        if len(name) <= letters and (bottom - top) * self.row_px >= 12:
            piece = next(p for p in parts if (top, bottom) in list(self._bars(p)))
            self._text((piece.left + piece.right) / 2, (top + bottom) / 2, name, colour, ink_on(colour))

    def _text(self, x: float, y: float, text: str, ground: str, ink: str) -> None:
        box: dict[str, Any] = {"facecolor": ground, "edgecolor": "none", "pad": 0.6}
        self.axes.text(
            x * self.scale, y, text, bbox=box, fontsize=7.5, color=ink, ha="center", va="center", clip_on=True
        )

    def _average(self, row: Row, spans: Sequence[Span]) -> float:
        window = Span(row.first * self.share, row.end * self.share)
        return sum(len(span & window) for span in spans) / row.ranks


def _span(tensor: TensorPlan) -> Span:
    return Span(tensor.start, tensor.start + tensor.spec.numel)


def _last_part(name: str) -> str:
    parts = [part for part in name.split(".") if part not in ("weight", "bias")]
    return parts[-1] if parts else name
