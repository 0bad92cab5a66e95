"""`vescale-fsdp plugins`: which formats and constraints are installed, and what each asks of a model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from vescale_fsdp.cli.errors import user_errors

if TYPE_CHECKING:
    from rich.table import Table

    from vescale_fsdp.plugins import Registry
    from vescale_fsdp.shapes import ModelShapes

__all__ = ["plugins"]


def plugins(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[INPUT]",
            help="A model's JSON, a .safetensors file, its index or folder, or package.module:factory.",
        ),
    ] = None,
) -> None:
    """List the installed block formats and layout constraints, and with INPUT what each asks of that model's matrices.

    Broken plugins are listed with their distribution, the hook that failed and the reason; the exit code is then 1.
    """
    import warnings

    with user_errors():
        from vescale_fsdp.plugins import registry

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what is broken is listed below
            found = registry()
        shapes = _read(source) if source is not None else None
    from rich.console import Console

    console = Console()
    console.print(_formats(found))
    console.print(_constraints(found))
    if shapes is not None:
        console.print(_asked(found, shapes))
    for problem in found.broken:
        console.print(f"broken: {problem}", markup=False, highlight=False, soft_wrap=True)
    if found.broken:
        raise typer.Exit(1)


def _read(source: str) -> ModelShapes:
    from vescale_fsdp.shapes import read_shapes

    return read_shapes(source)


def _formats(found: Registry) -> Table:
    table = _table("block formats", "name", "from", "block", "bits", "scale", "bytes per element")
    for name, named in sorted(found.formats.items()):
        format = named.value
        block = "x".join(map(str, format.block_shape))
        scale = str(format.scale_dtype).removeprefix("torch.")
        table.add_row(name, named.distribution, block, str(format.bits), scale, f"{_nbytes(found, name):.4f}")
    return table


def _nbytes(found: Registry, name: str) -> float:
    """Bytes per element of whole blocks, scales included."""
    import math

    format = found.format(name)
    return format.bits / 8 + format.scale_dtype.itemsize / math.prod(format.block_shape)


def _constraints(found: Registry) -> Table:
    table = _table("layout constraints", "name", "from")
    for name, named in sorted(found.constraints.items()):
        table.add_row(name, named.distribution)
    return table


def _asked(found: Registry, shapes: ModelShapes) -> Table:
    """For each format, how many matrices may be cut where."""
    table = _table(f"what formats ask of {shapes.model}", "name", "stays whole", "matrices", "such as")
    names: dict[tuple[tuple[str, int, str], ...], list[str]] = {}
    for name in sorted(found.formats):
        names.setdefault(_asked_by(found, name, shapes), []).append(name)
    for answers, alike in names.items():
        for i, (asked, count, example) in enumerate(answers):
            table.add_row("" if i else ", ".join(alike), asked, str(count), example)
    return table


def _asked_by(found: Registry, name: str, shapes: ModelShapes) -> tuple[tuple[str, int, str], ...]:
    """What a format asks for, of how many matrices, and one of them; the most frequent first."""
    from vescale_fsdp.policy import ParamPolicy

    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for group in shapes.groups:
        for spec in group.specs:
            if len(spec.shape) > 1:
                granularity = found.granularity_of(spec.fqn, spec.shape, ParamPolicy(format=name))
                asked = granularity.reasons[0].partition(" (")[0]
                counts[asked] += group.count
                examples.setdefault(asked, f"{spec.fqn} {'x'.join(map(str, spec.shape))}")
    return tuple((asked, count, examples[asked]) for asked, count in counts.most_common())


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("from", "stays whole"))
    return table
