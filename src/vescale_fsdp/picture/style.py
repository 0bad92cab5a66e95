"""What all pictures share: colours that colour-blind readers can tell apart, units, and how a file is written."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import VescaleError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "GREY",
    "INK",
    "PADDING",
    "PALETTE",
    "PictureError",
    "byte_unit",
    "darker",
    "ink_on",
    "new_figure",
    "save",
    "size_text",
]

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#332288")
"""Okabe and Ito's colours in an order whose neighbours differ in lightness too."""

INK = "#222222"
GREY = "#9A9A9A"
PADDING: dict[str, Any] = {"facecolor": "#F4F4F4", "edgecolor": GREY, "linewidth": 0, "hatch": "//////"}

DPI = 110
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


class PictureError(VescaleError):
    """A picture that cannot be drawn or written."""


def new_figure(width: float, height: float) -> Figure:
    """A figure that no window and no global state knows of."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PictureError("a picture needs matplotlib. Run: pip install 'vescale-fsdp[viz]'")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, facecolor="white")


def save(figure: Figure, file: Path) -> None:
    """Write a PNG, whatever the file is called, of 128 colours: a quarter of the size, and as sharp."""
    from PIL import Image  # comes with matplotlib

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    with file.open("wb") as out:
        Image.open(drawn).convert("RGB").quantize(128).save(out, format="png", optimize=True)


def byte_unit(nbytes: float) -> tuple[str, int]:
    """The largest unit of which `nbytes` is at least two."""
    return next(((name, size) for name, size in _UNITS if nbytes >= 2 * size), _UNITS[-1])


def size_text(nbytes: float) -> str:
    """1536 -> `1536 bytes`, 3 * 2**20 -> `3 MiB`."""
    name, size = byte_unit(nbytes)
    value = nbytes / size
    return f"{value:.3g} {name}" if value < 1000 else f"{value:,.0f} {name}"


def ink_on(colour: str) -> str:
    """Black or white, whichever can be read on `colour` (#rrggbb)."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else INK


def darker(colour: str) -> str:
    """The same hue, told apart from its neighbour."""
    return "#" + "".join(f"{int(int(colour[at : at + 2], 16) * 0.82):02x}" for at in (1, 3, 5))
