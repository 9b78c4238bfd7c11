"""The command line's root; every other file of this package hangs its commands on it."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="kit",
    help="From a model and some GPUs to a plan, the files that run it, and a trained Hugging Face model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
