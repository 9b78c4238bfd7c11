"""The command line's root. A command is imported and built only when it is called, so that the others start fast."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import Annotated, Any, ClassVar, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from kit import __version__
from kit.entry_points import load, registered
from kit.errors import HINT, KitError, SpecError
from kit.extras import missing

COMMANDS = {
    **dict.fromkeys(("plan", "explain", "memory"), "plans"),
    **dict.fromkeys(("emit", "train", "rehearse", "recipes"), "runs"),
    "convert": "conversions",
    "generate": "generation",
}
"""Command → the file of this package that defines it: a function, or an app of commands, of the same name. The order is
that of the help. Commands of add-ons come after them."""
ADDONS = "kit.commands"
"""Group of entry points: command → a function, or an app of commands. ``ANSWERS`` beside it, if the module has it, are
the types of what the command prints with ``--json``."""
PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}
"""Settings of every app: plain text, and tracebacks as Python prints them."""


class Command(TyperCommand):
    """A command that says of some options that it does not have what to write instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.params for name in parameter.opts}
        # Options of a job are for a model; of a recipe its arguments change it.
        options = known if not any(arg.endswith((".yaml", ".yml")) for arg in args) else set[str]()
        for word in args:
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known and (today := _today(option, options)):
                raise SpecError(f"{option} is not an option of kit {self.name}: {today}")
        return super().parse_args(ctx, args)


def _today(option: str, known: set[str]) -> str | None:
    """What to write instead of an option that is not one of ``known``; None if kit does not know that."""
    from kit.specs.job import JobSpec, Objective, OptimizerName, OptimizerSpec, Precision
    from kit.specs.layout import ENGINES, PINNABLE

    word = option.removeprefix("--")
    name = word.replace("-", "_")
    if known and (own := _OF_TRAINERS.get(name)):
        return f"write {own}"
    if name in PINNABLE:
        return f"write layout.{name}=…"
    for section, spec in (("job", JobSpec), ("job.optimizer", OptimizerSpec)):
        if name in spec.__dataclass_fields__:
            return f"write {section}.{name}=…"
    values = {
        "objective": ("job.objective", get_args(Objective)),
        "precision": ("job.precision", get_args(Precision)),
        "optimizer": ("job.optimizer.name", get_args(OptimizerName)),
        "engine": ("layout.engine", ENGINES),
    }
    for owner, (key, words) in values.items():
        if word in words:
            return f"write --{owner} {word}" if f"--{owner}" in known else f"write {key}={word}"
    return None


_OF_TRAINERS = {
    "lr": "job.learning_rate=…",
    "num_train_epochs": "--epochs",
    "per_device_train_batch_size": "layout.micro_batch_size=…",
    "batch_size": "--global-batch-size",
    "max_length": "--seq-length",
    "max_seq_length": "--seq-length",
    "model": "the model as the first argument",
    "model_name_or_path": "the model as the first argument",
    "dataset": "--data",
    "dataset_name": "--data",
    "output_dir": "--out",
    "use_peft": "--lora",
    "lora_r": "--lora job.lora.rank=…",
    "load_in_4bit": "--qlora",
    "load_in_8bit": "--lora job.lora.eight_bit=true",
}
"""Options of TRL's and other trainers' command lines → what says the same here."""


class WithAddons(TyperGroup):
    """The commands of an app, and after them those of add-ons, which no command of the app looks for."""

    group: ClassVar[str]
    """Their group of entry points."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys((*super().list_commands(ctx), *registered(self.group))))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if own := super().get_command(ctx, cmd_name):
            return own
        entry = registered(self.group).get(cmd_name)
        return entry and _built(cmd_name, load(entry))


class _Commands(WithAddons):
    group = ADDONS

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys((*COMMANDS, *super().list_commands(ctx))))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        return _built(cmd_name, getattr(import_module(f"kit.cli.{COMMANDS[cmd_name]}"), cmd_name))


def _built(name: str, found: Any) -> Any:
    """A command of a function, or of an app."""
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(**PLAIN)
        found.command(name, cls=Command)(function)
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
