"""``kit ui``: the planner in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Recipes, cluster files and model directories to offer; the page reads no other file."),
    ] = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.", min=1, max=65535)] = 8080,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Plan in a browser on this machine: every layout as a point, memory, schedule, cost. Needs the extra ui."""
    from kit.addons.ui.server import serve

    serve(files or (), port, open_browser)
