"""`vescale-fsdp plan`: where every parameter's elements go, as table, text, JSON and picture."""

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

    from vescale_fsdp.model_plan import ModelPlan, PlannedGroup

__all__ = ["plan"]


def plan(
    source: Source,
    ranks: Annotated[int, typer.Option(help="Ranks that share the parameters.")],
    rows: Rows = [],  # noqa: B006  typer's way to spell a repeatable option
    block: Block = [],  # noqa: B006
    format: Format = [],  # noqa: B006
    max_lanes: MaxLanes = None,
    dtype: Dtype = None,
    group_by: GroupBy = [],  # noqa: B006
    json: JsonFile = None,
    png: PngFile = None,
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
        check_at_least(ranks, 1, "--ranks", MAX_RANKS)
        made = plan_model(load(source, rows, block, format, dtype, group_by), ranks, max_lanes=max_lanes)
        if json is not None:
            with writing(json):
                json.write_text(made.to_json())
        if png is not None:
            from vescale_fsdp.picture import draw_plan

            with writing(png):
                draw_plan(made, png)
    show(made, explain=explain)


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
