"""What a user sees when something is wrong: one line on stderr and exit code 2, never a traceback.

A command checks all its input inside `user_errors()` before it starts to work:

    with user_errors():
        settings = Settings(...)      # raises ValueError or OSError with a text for the user
    run(settings)                     # an exception from here on is a bug, and keeps its traceback
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

__all__ = ["BAD_INPUT", "OneLineErrors", "user_errors"]

BAD_INPUT = 2


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a ValueError, OSError or NotImplementedError raised inside into its one line and exit code 2."""
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        _print_error(_text(error))
        raise typer.Exit(BAD_INPUT) from error


class OneLineErrors(TyperGroup):
    """A typer group whose own complaints (unknown option, not a number) are one line too, without a box or usage."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,  # click's own signature
    ) -> Any:
        args = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except Exception as error:
            # click's class was vendored into typer in 0.2x, so it is known by what it can do.
            if not hasattr(error, "format_message"):
                raise
            _print_error(f"{error.format_message().rstrip('.')}. See {_command_path(error, prog_name)} --help.")
            code = BAD_INPUT
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def _command_path(error: Exception, prog_name: str | None) -> str:
    context = getattr(error, "ctx", None)
    return str(context.command_path) if context is not None else prog_name or "vescale-fsdp"


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _print_error(text: str) -> None:
    typer.echo("Error: " + " ".join(text.split()), err=True)
