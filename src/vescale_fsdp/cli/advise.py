"""`vescale-fsdp advise`: how many ranks should share the parameters, as table, JSON and chart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vescale_fsdp.cli.errors import user_errors
from vescale_fsdp.cli.source import (
    MAX_RANKS,
    Block,
    Dtype,
    Format,
    GroupBy,
    JsonFile,
    MaxLanes,
    PngFile,
    Rows,
    Source,
    check_at_least,
    check_lanes,
    load,
    writing,
)

if TYPE_CHECKING:
    from rich.table import Table

    from vescale_fsdp.advisor import Advice

__all__ = ["advise"]

MaxPadding = Annotated[float, typer.Option(help="Percent of padding that the knee may have.")]
StateBytes = Annotated[
    int, typer.Option(help="Optimizer state per element: fp32 master and AdamW's two moments are 12.")
]


def advise(
    source: Source,
    ranks: Annotated[int, typer.Option(help="Ranks of the whole job; every divisor is tried as shard-group size.")],
    rows: Rows = [],  # noqa: B006  typer's way to spell a repeatable option
    block: Block = [],  # noqa: B006
    format: Format = [],  # noqa: B006
    max_lanes: MaxLanes = None,
    dtype: Dtype = None,
    group_by: GroupBy = [],  # noqa: B006
    max_padding: MaxPadding = 3.0,
    state_bytes: StateBytes = 12,
    json: JsonFile = None,
    png: PngFile = None,
) -> None:
    """Compare every way to split the ranks into shard groups and replicas, and say where padding takes over."""
    with user_errors():
        from vescale_fsdp.advisor import advise as sweep

        check_lanes(max_lanes)
        check_at_least(ranks, 1, "--ranks", MAX_RANKS)
        check_at_least(state_bytes, 0, "--state-bytes")
        if not max_padding >= 0:
            raise ValueError(f"--max-padding: expected a percentage >= 0, got {max_padding}")
        shapes = load(source, rows, block, format, dtype, group_by)
        advice = sweep(shapes, ranks, max_lanes=max_lanes, max_padding_pct=max_padding, bytes_of_state=state_bytes)
        if json is not None:
            with writing(json):
                json.write_text(advice.to_json())
        if png is not None:
            from vescale_fsdp.picture import draw_advice

            with writing(png):
                draw_advice(advice, png)
    show(advice)


def show(advice: Advice) -> None:
    """Print the sweep, the knee in words, and what merging layers would gain."""
    from rich.console import Console

    console = Console()
    console.print(_splits(advice))
    console.print(_knee(advice), markup=False, highlight=False)
    console.print()
    console.print(_merges(advice))


def _splits(advice: Advice) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from vescale_fsdp.picture.style import byte_unit

    unit, size = byte_unit(advice.knee.parameter_bytes * advice.knee.shard_size)
    columns = ("shard", "replicas", "pad %", "bound %", "params", "state", "gather", "reduce", "")
    title = f"{advice.model} on {advice.num_ranks} ranks, {unit} per rank"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for split in advice.splits:
        is_knee = split is advice.knee
        nbytes = (split.parameter_bytes, split.state_bytes, split.all_gather_bytes, split.all_reduce_bytes)
        table.add_row(
            str(split.shard_size),
            str(split.replicas),
            f"{split.padding_pct:.3f}",
            f"{split.bound_pct:.3f}",
            *(_number(value / size) for value in nbytes),
            "<- knee" if is_knee else "",
            style="bold" if is_knee else None,
        )
    return table


def _number(value: float) -> str:
    """Three digits that count: 1,306 and 2.7 and 0.0042."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _knee(advice: Advice) -> str:
    knee, sizes = advice.knee, [split.shard_size for split in advice.splits]
    text = f"Knee: {knee.shard_size} ranks share the parameters at {knee.padding_pct:.2f} % padding"
    if knee.padding_pct > advice.max_padding_pct:
        return f"{text}; no size stays within {advice.max_padding_pct:g} %."
    behind = advice.splits[sizes.index(knee.shard_size) + 1 :]
    if not behind:
        return f"{text}, the largest there is."
    return f"{text}; {behind[0].shard_size} would pad {behind[0].padding_pct:.2f} %."


def _merges(advice: Advice) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from vescale_fsdp.picture.style import byte_unit

    counts = sorted({merge.layers for merge in advice.merges})
    unit, size_of = byte_unit(max(merge.gathered_bytes for merge in advice.merges))
    title = f"Layers per group: padding, and {unit} of the largest gathered group"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("shard", justify="right")
    for count in counts:
        table.add_column("1 layer" if count == 1 else f"{count} layers", justify="right", no_wrap=True)
    for size in dict.fromkeys(merge.shard_size for merge in advice.merges):
        merges = [merge for merge in advice.merges if merge.shard_size == size]
        table.add_row(
            str(size), *(f"{merge.padding_pct:.2f} % {_number(merge.gathered_bytes / size_of):>5}" for merge in merges)
        )
    return table
