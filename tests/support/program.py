"""The frame of every program here: options are its function's parameters, help is its module's text, and what the
function returns is the exit code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeVar

import typer

Names = Annotated[list[str], typer.Argument(metavar="[NAME]...", default_factory=list, show_default=False)]
"""Any number of names; ``chosen`` says what they stand for."""
Item = TypeVar("Item")


def run(main: Callable[..., int]) -> None:
    """Read the command line, call ``main`` with it, and exit with the code that it returns."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    text = sys.modules[main.__module__].__doc__ or ""

    @app.command(help="\b\n" + text.replace("\n\n", "\n\n\b\n"))  # \b: the lines stay as they are written
    @functools.wraps(main)
    def command(*arguments: object, **options: object) -> None:
        raise typer.Exit(main(*arguments, **options))

    app()


def chosen(names: Sequence[str], known: Iterable[Item]) -> list[Item]:
    """Those with these names, in their own order; without names all. Raises BadParameter, an exit code of 2."""
    by_name = {getattr(each, "name", each): each for each in known}
    if unknown := [name for name in names if name not in by_name]:
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(map(str, by_name))}")
    return [each for name, each in by_name.items() if not names or name in names]


def faults(plant: str, plant_all: bool, known: Iterable[str]) -> list[str]:
    """What ``--plant`` or ``--plant-all`` asks for, none without either. Raises BadParameter."""
    if plant and plant_all:
        raise typer.BadParameter(f"--plant {plant} and --plant-all: choose one")
    return chosen([plant] if plant else [], known) if plant or plant_all else []


def judged(caught: Sequence[bool], plant_all: bool) -> int:
    """Exit code of a program that planted faults: with ``--plant`` 1 where the fault was caught, as a comparison that
    turns red; with ``--plant-all`` 0 where all were."""
    print(f"{len(caught)} faults planted, {sum(caught)} caught")
    return int(not all(caught)) if plant_all else int(any(caught))
