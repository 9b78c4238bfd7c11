"""``python -m tests.system.examples``: every script of examples/ under every configuration, on two CPU
processes.

Each must become the engine, the stage and the number of processes that its configuration says, and give the losses of
the same script without any, on one process (KTO and GRPO: DDP on two). The plain loop's are plain torch's. Writes the
figures of docs/notes/own-scripts.md when all did.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from tests.support.page import Section, table
from tests.support.program import chosen, run
from tests.system.examples.cases import (
    LAYOUTS,
    SCRIPTS,
    ExampleError,
    Facts,
    alone,
    file_of,
    launched,
    plain_torch,
)
from tests.system.examples.inputs import STEPS, prepare

LOSS_BOUND, NORM_BOUND = 1e-5, 1e-4
"""Of each step, relative to the curve's largest value: processes add in another order. Doubled gradients move norms by
one, losses hardly. GRPO's loss starts at zero."""


Only = Annotated[list[str], typer.Option(help="only this one; repeatable", default_factory=list)]


def main(script: Only, layout: Only) -> int:
    """0 where every cell agrees."""
    scripts, layouts = chosen(script, SCRIPTS), chosen(layout, LAYOUTS)
    directory, failed, begin = prepare(), False, time.monotonic()
    rows: dict[str, dict[str, tuple[float, float]]] = {}
    for name in scripts:
        rows[name] = {}
        try:
            reference = alone(name, directory)
            if name == "accelerate_loop":
                errors = compared(reference, plain_torch(directory), "one process")
                print(f"  {name:16} {'one process':22} {_said(errors)} of plain torch", flush=True)
        except ExampleError as error:
            failed = True
            print(f"  {name:16} {'one process':22} FAILED: {error}", flush=True)
            continue
        for way in layouts:
            try:
                rows[name][way] = compared(launched(name, way, directory), reference, way)
                print(f"  {name:16} {way:22} {_said(rows[name][way])} of the reference", flush=True)
            except ExampleError as error:
                failed = True
                print(f"  {name:16} {way:22} FAILED: {error}", flush=True)
    agree = sum(len(cells) for cells in rows.values())
    print(
        f"{agree} of {len(scripts) * len(layouts)} cells agree, in {(time.monotonic() - begin) / 60:.1f} minutes",
        flush=True,
    )
    if not failed and not script and not layout:
        Section("docs/notes/own-scripts.md", "figures", lambda: figures(rows)).write()
    return int(failed)


def compared(found: Facts, reference: Facts, what: str) -> tuple[float, float]:
    """Largest difference of a loss, and of a gradient norm, relative to the largest one. Raises ExampleError where one
    is too large."""
    if not len(found.losses) == len(found.norms) == len(reference.losses) == STEPS:
        raise ExampleError(f"{what}: {len(found.losses)} losses and {len(found.norms)} norms of {STEPS} steps")
    loss, norm = _largest(found.losses, reference.losses), _largest(found.norms, reference.norms)
    if not (loss <= LOSS_BOUND and norm <= NORM_BOUND):
        raise ExampleError(f"{what}: {found} where the reference is {reference}")
    return loss, norm


def _largest(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True)) / max(map(abs, expected))


def _said(errors: tuple[float, float]) -> str:
    return f"losses within {errors[0]:.0e}, gradient norms within {errors[1]:.0e}"


def figures(rows: dict[str, dict[str, tuple[float, float]]]) -> str:
    """Markdown: a row a script, a column a layout."""
    cells = [
        [
            f"[{script}](../examples/{file_of(script).name})",
            *map("{:.0e}, {:.0e}".format, *zip(*row.values(), strict=True)),
        ]
        for script, row in rows.items()
    ]
    return table(("script", *LAYOUTS), cells)


if __name__ == "__main__":
    run(main)
