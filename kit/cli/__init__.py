"""The command line: parse, call, print. Everything it does is a function that a library user can call."""

from __future__ import annotations

import typer

from kit.cli.app import app
from kit.errors import KitError

# Each hangs its commands on the app, in the order in which a person needs them.
from kit.cli import plans, runs, checks, conversions  # isort: skip  # noqa: F401


def main() -> None:
    """Entry point: an error of the user's is one message and exit code 2, never a traceback."""
    try:
        app(standalone_mode=True)
    except KitError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        raise SystemExit(2) from None


__all__ = ["app", "main"]
