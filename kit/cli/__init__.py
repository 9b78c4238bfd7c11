"""The command line: parse, call, print. Everything it does is a function that a library user can call."""

from __future__ import annotations

import gc

gc.disable()  # importing makes much and frees nothing: searching it for cycles took a tenth of a command's start

import typer  # noqa: E402

from kit.cli.app import app  # noqa: E402
from kit.errors import KitError  # noqa: E402

# Each hangs its commands on the app, in the order in which a person needs them.
from kit.cli import plans, runs, checks, conversions  # isort: skip  # noqa: E402, F401

gc.freeze()
gc.enable()


def main() -> None:
    """Entry point: an error of the user's is one message and exit code 2, never a traceback."""
    try:
        app(standalone_mode=True)
    except KitError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        raise SystemExit(2) from None


__all__ = ["app", "main"]
