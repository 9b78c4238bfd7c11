"""``kit plan FILE`` of another trainer's file."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer

from kit.addons.configs.answer import ConfigJson
from kit.cli.options import echo_json, terminal
from kit.errors import SpecError

ANSWERS = {"plan FILE": ConfigJson}


def command(path: Path, gpus: str | None, row_tokens: int | None, patch: bool, as_json: bool) -> None:
    """Print the answer, or the diff alone. Exit code 0 if it fits, 1 if not, or if something in it is an error."""
    from kit.addons.configs.answer import answer
    from kit.addons.configs.text import text_of

    found = answer(path, gpus, row_tokens)
    if patch:
        if not found.patch:
            raise SpecError(f"{path}: {'nothing is faster' if found.now.fits else 'no change of it fits'}; no patch")
        typer.echo(found.patch, nl=False)
    elif as_json:
        echo_json(found.as_json())
    else:
        width, style = terminal()
        again = shlex.join(["kit", "plan", str(path), *(["--gpus", gpus] if gpus else [])])
        pipe = "" if found.asked.source.form == "python" else f" | patch {shlex.quote(str(path))}"
        then = (f"{again} --patch{pipe}",) if found.patch else ()
        typer.echo(text_of(found, then, width, style))
    if found.exit_code and not patch:
        raise typer.Exit(found.exit_code)
