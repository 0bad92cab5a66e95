"""The typer app: which file answers which subcommand.

A command's file imports typer and the standard library only; what the command runs (torch above all) is imported when
it runs, so that `--help` and errors in the arguments come at once.
"""

from __future__ import annotations

import typer

from vescale_fsdp.cli.advise import advise
from vescale_fsdp.cli.errors import OneLineErrors
from vescale_fsdp.cli.migrate import migrate
from vescale_fsdp.cli.plan import plan
from vescale_fsdp.cli.plugins import plugins
from vescale_fsdp.cli.simulate import simulate
from vescale_fsdp.cli.train import train

__all__ = ["app"]

app = typer.Typer(
    cls=OneLineErrors,
    help="Fully sharded training with RaggedShard: train a demo, look at plans and plugins, choose group sizes.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(plan)
app.command()(advise)
app.command()(simulate)
app.command()(plugins)
app.command()(migrate)


@app.callback()
def _several_commands() -> None:  # typer folds an app of one command into that command unless it has a callback
    pass
