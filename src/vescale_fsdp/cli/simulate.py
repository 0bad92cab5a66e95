"""`vescale-fsdp simulate`: what a step would take and hold at many numbers of ranks, for us and for FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vescale_fsdp.cli.errors import user_errors
from vescale_fsdp.cli.source import Block, Format, GroupBy, JsonFile, PngFile, Rows, Source, check_at_least, load

if TYPE_CHECKING:
    from rich.table import Table

    from vescale_fsdp.simulate import Point, Scaling, Workload

__all__ = ["simulate"]

Active = Annotated[
    list[str], typer.Option(metavar="PATTERN=K/N", help="Share of these tensors that a token meets: '*mlp1*=4/128'.")
]


def simulate(
    source: Source,
    ranks: Annotated[list[int], typer.Option(help="Numbers of ranks; repeat it. Default: 8, 16, ... 16384.")] = [],  # noqa: B006
    machine: Annotated[str, typer.Option(metavar="NAME|FILE", help="'h800', or rates as JSON.")] = "h800",
    tokens: Annotated[int, typer.Option(help="Tokens per rank and step.")] = 8192,
    active: Active = [],  # noqa: B006
    rows: Rows = [],  # noqa: B006
    block: Block = [],  # noqa: B006
    format: Format = [],  # noqa: B006
    group_by: GroupBy = [],  # noqa: B006
    compute_dtype: Annotated[str, typer.Option(help="Of gathered parameters.")] = "bfloat16",
    reduce_dtype: Annotated[str, typer.Option(help="Of reductions.")] = "float32",
    recompute: Annotated[bool, typer.Option(help="Activation checkpointing: forward is computed twice.")] = True,
    activation_gib: Annotated[float, typer.Option(help="GiB of activations at the fullest moment.")] = 0.0,
    json: JsonFile = None,
    png: PngFile = None,
) -> None:
    """Compute step time, MFU and peak memory from a plan, the machine's rates and the alpha-beta model of its links.

    Parameters are float32 at rest, with AdamW. docs/simulate.md states the model and how it was validated.
    """
    with user_errors():
        from vescale_fsdp.simulate import draw_scaling, read_machine, scale

        workload = _workload(
            (source, rows, block, format, group_by),
            tokens,
            active,
            (compute_dtype, reduce_dtype),
            recompute,
            activation_gib,
        )
        for each in ranks:
            check_at_least(each, 1, "--ranks")
        made = scale(workload, read_machine(machine), ranks or [2**power for power in range(3, 15)])
        if json is not None:
            json.write_text(made.to_json())
        if png is not None:
            draw_scaling(made, png)
    show(made)


def _workload(
    model: tuple[str, list[str], list[str], list[str], list[str]],
    tokens: int,
    active: list[str],
    dtypes: tuple[str, str],
    recompute: bool,
    activation_gib: float,
) -> Workload:
    from vescale_fsdp.simulate import Workload

    source, rows, block, format, group_by = model
    check_at_least(tokens, 1, "--tokens")
    if not activation_gib >= 0:
        raise ValueError(f"--activation-gib: expected a number >= 0, got {activation_gib}")
    shapes = load(source, rows, block, format, None, group_by)
    return Workload(
        shapes,
        tokens,
        compute_dtype=_float_dtype(dtypes[0], "--compute-dtype"),
        reduce_dtype=_float_dtype(dtypes[1], "--reduce-dtype"),
        active=dict(map(_share, active)),
        checkpointed=recompute,
        activation_bytes=round(activation_gib * 2**30),
    )


def _float_dtype(name: str, option: str) -> str:
    known = ("float32", "bfloat16", "float16")
    if name not in known:
        raise ValueError(f"{option}: expected one of {', '.join(known)}, got {name!r}")
    return name


def _share(text: str) -> tuple[str, float]:
    pattern, _, share = text.partition("=")
    part, _, whole = share.partition("/")
    if not pattern or not part.isdigit() or not (whole or "1").isdigit() or int(whole or 1) < 1:
        raise ValueError(f"--active: expected PATTERN=K/N, such as '*experts*=4/128', got {text!r}")
    return pattern, int(part) / int(whole or 1)


def show(made: Scaling) -> None:
    """Print weak scaling of each engine, and where it stops fitting."""
    from rich.console import Console

    console = Console()
    rates = f"{made.model} on {made.machine.name}, {made.weak[0].tokens:,} tokens per rank"
    console.print(f"{rates}: milliseconds of a step, gather and reduce as far as exposed", highlight=False)
    for name in dict.fromkeys(point.engine for point in made.weak):
        points = [point for point in made.weak if point.engine == name]
        console.print(_table(name, points))
        console.print(_verdict(name, points), highlight=False)


def _table(name: str, points: list[Point]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=name, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("ranks", "pad %", "compute", "gather", "reduce", "copies", "optim", "step", "MFU %", "peak GiB"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in points:
        table.add_row(*_cells(point))
    return table


def _cells(point: Point) -> tuple[str, ...]:
    time = point.time
    parts = (time.compute, time.exposed_gather, time.exposed_reduce, time.copies, time.optimizer, time.total)
    peak = f"{point.memory.peak / 2**30:.1f}" + ("  " if point.fits else " !")
    head = (str(point.num_ranks), f"{point.padding_pct:.1f}")
    return (*head, *(f"{1e3 * part:.4g}" for part in parts), f"{100 * time.mfu:.1f}", peak)


def _verdict(name: str, points: list[Point]) -> str:
    fitting = [str(point.num_ranks) for point in points if point.fits]
    if len(fitting) == len(points):
        return f"{name} fits at each of these numbers of ranks."
    return f"{name} fits on {', '.join(fitting) or 'none of these numbers of'} ranks; ! marks where it does not."
