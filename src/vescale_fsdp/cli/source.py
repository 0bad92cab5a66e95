"""The arguments that `plan` and `advise` share: which model, what it asks for, and where results go.

def plan(source: Source, ranks: ..., rows: Rows = [], ...):
    with user_errors():
        shapes = load(source, rows, block, format, dtype, group_by)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vescale_fsdp.shapes import ModelShapes

__all__ = [
    "MAX_RANKS",
    "Block",
    "Dtype",
    "Format",
    "GroupBy",
    "JsonFile",
    "MaxLanes",
    "PngFile",
    "Rows",
    "Source",
    "check_at_least",
    "check_lanes",
    "load",
    "writing",
]

MAX_RANKS = 1 << 20
"""More are a slip of the pen; `advise` tries every divisor."""

Source = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="A model's JSON, a .safetensors file, its index or folder, or package.module:factory.",
    ),
]
Rows = Annotated[list[str], typer.Option(metavar="[PATTERN=]N", help="Keep N rows together; 'whole': each matrix.")]
Block = Annotated[list[str], typer.Option(metavar="[PATTERN=]NxM", help="Keep NxM blocks whole.")]
Format = Annotated[list[str], typer.Option(metavar="[PATTERN=]NAME", help="What a registered block format asks for.")]
MaxLanes = Annotated[
    int | None, typer.Option(help="At most so many buffers per group, 1 to 3. Default: where it pays.")
]
Dtype = Annotated[str | None, typer.Option(help="Store parameters as this torch dtype. Default: bfloat16 for JSON.")]
GroupBy = Annotated[
    list[str], typer.Option(metavar="PATTERN", help="Modules that are groups, such as 'layers.*'; 'none': one group.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")]
PngFile = Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw a picture.")]


def load(
    source: str, rows: list[str], block: list[str], format: list[str], dtype: str | None, group_by: list[str]
) -> ModelShapes:
    """The model's shapes with every wish granted; ValueError says what is wrong with the input."""
    from vescale_fsdp.shapes import read_shapes
    from vescale_fsdp.wishes import grant, parse_wish

    wishes = [parse_wish("rows", text) for text in rows]
    wishes += [parse_wish("block", text) for text in block]
    wishes += [parse_wish("format", text) for text in format]
    return grant(read_shapes(source, dtype=dtype, group_by=group_by), wishes)


def check_lanes(max_lanes: int | None) -> None:
    if max_lanes is not None and not 1 <= max_lanes <= 3:
        raise ValueError(f"--max-lanes: expected 1, 2 or 3, got {max_lanes}")


def check_at_least(value: int, least: int, option: str, most: int | None = None) -> None:
    if value < least:
        raise ValueError(f"{option}: expected a whole number >= {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{option}: expected at most {most:,}, got {value:,}")


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """An error without a file's name, such as that of a full disk, gets this one's."""
    try:
        yield
    except OSError as error:
        if not error.strerror:
            raise ValueError(f"{file}: {error}") from error
        raise OSError(error.errno, error.strerror, str(error.filename or file)) from error
