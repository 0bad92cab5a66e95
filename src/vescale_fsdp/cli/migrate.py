"""`vescale-fsdp migrate`: what changes when a model moves from torch's fully_shard, as table and JSON."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vescale_fsdp.cli.errors import user_errors
from vescale_fsdp.cli.source import Block, Dtype, Format, GroupBy, MaxLanes, Rows, check_at_least, check_lanes, load

if TYPE_CHECKING:
    from rich.table import Table

    from vescale_fsdp.checkpoint.calls import Finding
    from vescale_fsdp.checkpoint.change import Change
    from vescale_fsdp.shapes import ModelShapes

__all__ = ["migrate"]

MUST_CHANGE = 1


def migrate(
    check: Annotated[str, typer.Option(metavar="MODULE:FACTORY", help="What makes the model, without arguments.")],
    ranks: Annotated[int, typer.Option(help="Ranks that share the parameters.")] = 8,
    rows: Rows = [],  # noqa: B006  typer's way to spell a repeatable option
    block: Block = [],  # noqa: B006
    format: Format = [],  # noqa: B006
    max_lanes: MaxLanes = None,
    dtype: Dtype = None,
    group_by: GroupBy = [],  # noqa: B006
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as JSON.")] = None,
) -> None:
    """Say what changes when a model moves from torch's fully_shard: padding, copies, peak, and calls to replace.

    The model is built on the meta device, and its source is read, not run. Exit code 1: something has to be changed.
    """
    with user_errors():
        from vescale_fsdp.checkpoint.change import what_changes

        check_lanes(max_lanes)
        check_at_least(ranks, 1, "--ranks")
        shapes, findings = _look_at(check, rows, block, format, dtype, group_by)
        change = what_changes(shapes, ranks, findings, max_lanes=max_lanes)
        if json is not None:
            json.write_text(change.to_json())
    show(change)
    if change.must_change:
        raise typer.Exit(MUST_CHANGE)


def _look_at(
    source: str, rows: list[str], block: list[str], format: list[str], dtype: str | None, group_by: list[str]
) -> tuple[ModelShapes, list[Finding]]:
    """The model's shapes with every wish granted, and what its source and parameters show."""
    from vescale_fsdp.checkpoint.calls import findings_in_model, findings_in_source, sources_of
    from vescale_fsdp.shapes import build

    if not re.fullmatch(r"[\w.]+:[\w.]+", source):
        raise ValueError(f"--check: expected package.module:factory, got {source!r}")
    module = build(source)
    shapes = load(source, rows, block, format, dtype, group_by)
    findings = [each for path in sources_of(module, source.partition(":")[0]) for each in findings_in_source(path)]
    return shapes, findings + findings_in_model(module.named_parameters())


def show(change: Change) -> None:
    """Print both layouts side by side, the sums, and what to look at."""
    from rich.console import Console

    from vescale_fsdp.picture.style import size_text

    console = Console(soft_wrap=True)
    console.print(_table(change))
    for what, torchs, ours in (
        ("copied per step and rank", change.torch_copied_nbytes, change.our_copied_nbytes),
        ("peak without activations", change.peak_nbytes("torch_share"), change.peak_nbytes("our_share")),
    ):
        console.print(f"{what}: {size_text(torchs)} -> {size_text(ours)}", highlight=False)
    if not change.findings:
        console.print("nothing in the program has to change", highlight=False)
    for finding in change.findings:
        mark = "must change" if finding.must_change else "note"
        console.print(f"{mark}: {finding.where}: {finding.what}; {finding.do}", markup=False, highlight=False)


def _table(change: Change) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from vescale_fsdp.picture.style import size_text

    title = f"{change.model} over {change.num_ranks} ranks: torch's fully_shard -> ours"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("group", overflow="fold")
    for name in ("copies", "pad %", "-> pad %", "per rank", "-> per rank"):
        table.add_column(name, justify="right")
    for group in change.groups:
        sizes = (round(share * group.nbytes_per_element) for share in (group.torch_share, group.our_share))
        pads = (f"{group.padding_pct(share):.4f}" for share in (group.torch_share, group.our_share))
        table.add_row(group.name, str(group.count), *pads, *map(size_text, sizes))
    table.add_section()
    table.add_row("all", "", *(f"{change.padding_pct(share):.4f}" for share in ("torch_share", "our_share")), "", "")
    return table
