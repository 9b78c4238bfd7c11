"""The command line: parse, call, print. Everything it does is a function that a library user can call."""

from __future__ import annotations

import io
import os
import sys

import typer

from kit.cli.app import app
from kit.errors import KitError


def main() -> None:
    """Entry point: an error of the user's is one message and exit code 2, never a traceback."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")  # kit has none, and looking for them takes time
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a pipe on Windows is not UTF-8
    try:
        app(standalone_mode=True)
    except KitError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        raise SystemExit(2) from None


__all__ = ["app", "main"]
