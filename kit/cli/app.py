"""The command line's root. A command is imported and built when it is asked for: that keeps the others' time."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kit import __version__
from kit.errors import SpecError

COMMANDS = {
    **dict.fromkeys(("plan", "explain", "memory"), "plans"),
    **dict.fromkeys(("emit", "train", "rehearse", "recipes"), "runs"),
    **dict.fromkeys(("lint", "doctor"), "checks"),
    "convert": "conversions",
}
"""Command → file of this package that has a function, or an app of commands, of its name. In the order in which a
person needs them."""
PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}
"""Settings of every app: plain text, and tracebacks as Python prints them."""
_MOVED = {
    "--fix": "an argument pins a choice, such as layout.tp=8; kit lint writes a corrected copy with --write-fixed",
    "--zero": "write layout.zero_stage=3",
}
"""Earlier option → what to write today."""


class Command(TyperCommand):
    """Refuses an option that is written otherwise, and says how."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.params for name in parameter.opts}
        for word in args:
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known and (today := _today(option)):
                raise SpecError(f"{option} is not an option of kit {self.name}: {today}")
        return super().parse_args(ctx, args)


def _today(option: str) -> str | None:
    """What to write for an option that kit never had, or has no longer; None where it is neither."""
    from kit.specs.layout import PINNABLE

    name = option.removeprefix("--").replace("-", "_")
    return f"write layout.{name}=…" if name in PINNABLE else _MOVED.get(option)


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        found = getattr(import_module(f"kit.cli.{COMMANDS[cmd_name]}"), cmd_name)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(**PLAIN)
            found.command(cmd_name, cls=Command)(function)
        return typer.main.get_command(found)


app = typer.Typer(cls=_Commands, no_args_is_help=True, **PLAIN | {"add_completion": True})


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kit {__version__}")
        raise typer.Exit


@app.callback()
def _kit(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan the training of a language model, write the files that run it, train, and convert checkpoints."""
