"""``kit convert inspect``: what a checkpoint is, whoever wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kit.addons.importers.inspected import Inspected
from kit.cli.options import AsJson, answer

ANSWERS = {"convert inspect": Inspected}


def command(
    path: Annotated[Path, typer.Argument(help="Directory or file of any program's checkpoint.")],
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint is: program, step, layout, weights, Adam's state, and what kit does with it.

    Reads headers, and pickles by a closed list of classes; runs nothing of them.
    """
    from kit.addons.importers.inspected import inspected

    found = inspected(path)
    answer(found, str(found), as_json)
