"""`vescale-fsdp plan`: where every parameter's elements go, as table, text, JSON and picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vescale_fsdp.cli.errors import user_errors

if TYPE_CHECKING:
    from rich.table import Table

    from vescale_fsdp.model_plan import ModelPlan, PlannedGroup
    from vescale_fsdp.shapes import ModelShapes

__all__ = ["check_at_least", "check_lanes", "load", "plan"]

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


def plan(
    source: Source,
    ranks: Annotated[int, typer.Option(help="Ranks that share the parameters.")],
    rows: Rows = [],  # noqa: B006  typer's way to spell a repeatable option
    block: Block = [],  # noqa: B006
    format: Format = [],  # noqa: B006
    max_lanes: MaxLanes = None,
    dtype: Dtype = None,
    group_by: GroupBy = [],  # noqa: B006
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as JSON.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw ranks and bytes, a colour per tensor.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say it in words: lanes, bounds, who asked for what.")
    ] = False,
) -> None:
    """Plan how a model's parameters are cut over ranks, without weights, process group or GPU.

    PATTERN is a parameter's name with * for anything; of several that match, the last one counts.
    """
    with user_errors():
        from vescale_fsdp.model_plan import plan_model

        check_lanes(max_lanes)
        check_at_least(ranks, 1, "--ranks")
        made = plan_model(load(source, rows, block, format, dtype, group_by), ranks, max_lanes=max_lanes)
        if json is not None:
            json.write_text(made.to_json())
        if png is not None:
            from vescale_fsdp.picture import draw_plan

            draw_plan(made, png)
    show(made, explain=explain)


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


def check_at_least(value: int, least: int, option: str) -> None:
    if value < least:
        raise ValueError(f"{option}: expected a whole number >= {least}, got {value}")


def show(made: ModelPlan, *, explain: bool) -> None:
    """Print the table, or the explanation."""
    from rich.console import Console

    console = Console(soft_wrap=explain)
    if explain:
        console.print(made.explain(), markup=False, highlight=False)
    else:
        console.print(_table(made))
        milliseconds = made.seconds * 1e3
        console.print(f"planned in {milliseconds:.3g} ms", highlight=False)


def _table(made: ModelPlan) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from vescale_fsdp.picture.style import size_text

    title = f"{made.shapes.model} over {made.num_ranks} ranks"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("group", overflow="fold")
    for name in ("copies", "tensors", "lanes", "per rank", "pad %", "bound %", "proved"):
        table.add_column(name, justify="right")
    for group in made.groups:
        table.add_row(*_cells(group))
    copies, tensors = sum(g.count for g in made.groups), sum(len(g.plan.specs) * g.count for g in made.groups)
    state = "no" if not made.proved else "yes" if made.padding_pct == made.bound_pct else "per lane"
    total = (size_text(made.nbytes), f"{made.padding_pct:.4f}", f"{made.bound_pct:.4f}", state)
    table.add_section()
    table.add_row("all", str(copies), str(tensors), "", *total)
    return table


def _cells(group: PlannedGroup) -> tuple[str, ...]:
    from vescale_fsdp.picture.style import size_text

    plan = group.plan
    padding, bound = f"{plan.padding_pct:.4f}", f"{plan.bound_pct:.4f}"
    state = "no" if not plan.proved else "yes" if plan.share == plan.bound else "in 1 lane"
    counts = (str(group.count), str(len(plan.specs)), str(len(plan.lanes)))
    return (group.shapes.name, *counts, size_text(plan.nbytes), padding, bound, state)
