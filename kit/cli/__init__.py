"""The command line: parse, call, print. What a command does is a function of ``kit.api``.

Its rooms, in the order in which data walks:

    app                      the root; commands of add-ons
    options                  what several commands take
    plans                    ``plan``, ``explain``, ``memory``
    new_recipe               the recipe of ``kit train MODEL --data FILE``
    runs                     ``emit``, ``train``, ``rehearse``, ``recipes``
    conversions, generation  ``convert``, ``generate``
    answers                  the schema of ``--json``
"""

from __future__ import annotations

import io
import os
import sys

import typer

from kit.cli.app import app
from kit.errors import HINT, KitError
from kit.extras import missing


def main() -> None:
    """Entry point. An error that the user can correct is printed as one message, with exit code 2 and no traceback."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")  # kit has none, and looking for them takes time
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a pipe on Windows is not UTF-8
    try:
        app(standalone_mode=True)
    except KitError as error:
        said = str(error)
    except ModuleNotFoundError as error:
        if (lacks := missing(error)) is None:
            raise
        said = lacks
    else:
        return
    for line in said.splitlines():
        typer.echo(line if line.startswith(HINT) else f"error: {line}", err=True)
    raise SystemExit(2)


__all__ = ["app", "main"]
