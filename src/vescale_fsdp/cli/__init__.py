"""The `vescale-fsdp` command, one file per subcommand; it needs the `cli` extra (typer and rich).

Reading order: errors, source, train, plan, advise, simulate, migrate, plugins, app.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

__all__ = ["main"]

_NEEDED = ("typer", "rich")


def main() -> None:
    """Run the console script; without the `cli` extra, one line that says how to get it, and exit code 2."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(_complain(f"{' and '.join(missing)} not installed. Run: pip install 'vescale-fsdp[cli]'"))
    from vescale_fsdp.cli.app import app

    app(prog_name="vescale-fsdp")


def _complain(text: str) -> int:
    print(f"Error: {text}", file=sys.stderr)
    return 2
