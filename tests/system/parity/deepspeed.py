"""Every layout of the DeepSpeed engine, against transformers and torch.

    python -m tests.system.parity.deepspeed                  both tables; exit code 1 if anything disagrees
    python -m tests.system.parity.deepspeed --rows Ulysses2 --columns llama
    python -m tests.system.parity.deepspeed --resumes        only the changes of layout
    python -m tests.system.parity.deepspeed --plant hpz-stale-copy  with a fault
    python -m tests.system.parity.deepspeed --plant-all      every fault; exit code 0 if all were caught
    python -m tests.system.parity.deepspeed --write docs/parity.md

A tiny model is trained in one process of plain transformers and torch's AdamW, then on pools of gloo processes, which
import DeepSpeed once for all layouts of their size. Labels are masked, a different number in each sample. Compared are
each parameter's gradient at step 1 and the loss and gradient norm of each step; and after a change of layout through
the masters and moments of the checkpoint, bit for bit, and the losses and norms of the steps that follow.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers.utils.logging import disable_progress_bar

from tests.deepspeed import cases, plain
from tests.support import tiny
from tests.support.page import ROOT, header, table, write_json
from tests.support.program import faults, judged, run
from tests.support.workers import WorkerError, pool
from tests.system.parity.cell import Cell, measured
from tests.system.parity.deepspeed_layouts import COLUMNS, EXACT, PLANTED, RESUMES, ROWS, Column, Row

STEPS = 20
HALF = 5
"""Steps before an exchange checkpoint, and after it."""
LIMIT_S = 300
RESULTS = ROOT / "benchmarks" / "results" / "deepspeed-parity.json"
NAME_CONTAINS = "those whose name contains this"


def main(
    rows: Annotated[str, typer.Option(help=NAME_CONTAINS)] = "",
    columns: Annotated[str, typer.Option(help=NAME_CONTAINS)] = "",
    resumes: Annotated[bool, typer.Option("--resumes", help="only the changes of layout")] = False,
    write: Annotated[
        Path | None, typer.Option(help="where the page goes; cells that are not run now keep their figures")
    ] = None,
    plant: Annotated[str, typer.Option(help="one fault, where it must show")] = "",
    plant_all: Annotated[bool, typer.Option("--plant-all", help="every fault")] = False,
) -> int:
    """Run, print, judge."""
    disable_progress_bar()
    names = faults(plant, plant_all, PLANTED)
    with tempfile.TemporaryDirectory(prefix="kit-parity-") as scratch:
        bench = _Bench(Path(scratch))
        if names:
            return judged([bench.measure(*PLANTED[name], name).caught for name in names], plant_all)
        pairs = [] if resumes else [(row, column) for row in ROWS for column in ROWS[row].columns]
        pairs = [(row, column) for row, column in pairs if rows in row and columns in column]
        changes = [pair for pair in RESUMES if rows in " → ".join(pair) and columns in "llama"]
        found: list[Cell] = []
        for pair in [*pairs, *changes]:
            found.append(bench.measure(*pair))
            if write:
                kept = _read() | {" | ".join(pair): {**found[-1].errors, "seconds": found[-1].seconds}}
                write_json(RESULTS, kept)  # beside those of earlier runs: a run of some rows replaces theirs
                write.write_text(page(_kept()), encoding="utf-8")
    bad = [cell for cell in found if not cell.agrees]
    print(f"{len(pairs)} cells, {len(changes)} resumes, {len(bad)} disagree")
    return 1 if bad or not found else 0


def _kept() -> dict[tuple[str, str], Cell]:
    """What rows and resumes of today have measured; those that are gone are left out."""
    figures = _read()
    bounds = {(row, column): COLUMNS[column].bounds for row in ROWS for column in ROWS[row].columns}
    bounds |= dict.fromkeys(RESUMES, EXACT)
    return {
        pair: Cell(bounds[pair], found, seconds=found["seconds"])
        for pair in bounds
        if (found := figures.get(" | ".join(pair)))
    }


def _read() -> dict[str, dict[str, float]]:
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


class _Bench:
    """References and pools, made when first asked for and kept: up to twelve processes, half a GiB each."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._number = scratch, itertools.count()
        self._references: dict[Any, tuple[Path, plain.Curve]] = {}

    def measure(self, row: str, other: str, fault: str | None = None) -> Cell:
        """A cell where ``other`` is a column, a resume where it is a row; prints a line."""
        train, join = (self._train, ", ") if other in COLUMNS else (self._resume, " → ")
        bounds = COLUMNS[other].bounds if other in COLUMNS else EXACT
        return measured(bounds, lambda: (train(row, other, fault), {}), f"{row}{join}{other}", fault)

    def _train(self, name: str, column_name: str, fault: str | None) -> dict[str, float]:
        row, column = ROWS[name], COLUMNS[column_name]
        start, expected = self._reference(column, STEPS)
        plan = self._plan(row, column)
        found = self._run(row, cases.train, plan, start, self._directory(), STEPS, fault, row.zero)
        if row.swaps and not found.swapped_bytes:
            raise WorkerError("nothing was on NVMe")
        return _errors(plain.gradient_error(found, expected), found, expected, 0)

    def _resume(self, before: str, after: str, fault: str | None) -> dict[str, float]:
        """HALF steps on one row, an exchange checkpoint, HALF on another: those of plain torch without a break."""
        first, then, directory = ROWS[before], ROWS[after], self._directory()
        column = COLUMNS["wide" if first.swaps or then.swaps else "llama"]
        start, expected = self._reference(column, 2 * HALF)
        self._run(first, cases.leave, self._plan(first, column), start, directory, HALF, first.zero)
        exchange, plan = directory / "exchange", self._plan(then, column)
        found, different = self._run(then, cases.go_on, plan, exchange, directory, HALF, fault, then.zero)
        return _errors(float("inf") if different else 0.0, found, expected, HALF)

    def _run(self, row: Row, case: Any, *arguments: Any) -> Any:
        # Megatron's processes have its table of patches for the CPU, DeepSpeed's have not.
        engine = "megatron" if row.over_megatron else "deepspeed"
        return pool(engine, row.world_size).run(case, *arguments, timeout_s=LIMIT_S)[0]

    def _plan(self, row: Row, column: Column) -> Any:
        return cases.plan(
            row.stage,
            precision=column.precision,
            spec=tiny.model(column.family, **column.shape),
            eps=column.eps,
            objective=column.objective,
            **row.layout,
        )

    def _reference(self, column: Column, steps: int) -> tuple[Path, plain.Curve]:
        key = column.family, repr(column.shape), column.eps, column.objective, steps
        if key not in self._references:
            spec = tiny.model(column.family, **column.shape)
            start = cases.hf_directory(self._directory(), spec=spec)
            self._references[key] = start, plain.reference(start, steps, column.eps, spec, column.objective)
        return self._references[key]

    def _directory(self) -> Path:
        directory = self._scratch / str(next(self._number))
        directory.mkdir()
        return directory


def _errors(gradient: float, found: plain.Curve, expected: plain.Curve, after: int) -> dict[str, float]:
    """``after``: steps of the reference before the first that was found."""
    loss = plain.curve_error(found.losses, expected.losses[after:])
    return {"gradient": gradient, "loss": loss, "norm": plain.curve_error(found.norms, expected.norms[after:])}


def page(found: Mapping[tuple[str, str], Cell]) -> str:
    """Markdown. ``found``: (row, column) or a resume's two rows → its figures."""
    cells = {pair: cell for pair, cell in found.items() if pair[1] in COLUMNS}
    resumes = {pair: cell for pair, cell in found.items() if pair[1] not in COLUMNS}
    columns = [name for name in COLUMNS if any(column == name for _, column in cells)]
    rows = [
        (name, row.world_size, *(_cell(found.get((name, column))) for column in columns))
        for name, row in ROWS.items()
        if any((name, column) in found for column in columns)
    ]
    agree = sum(cell.agrees for cell in cells.values())
    every = sum(len(row.columns) for row in ROWS.values())
    return f"""{header("DeepSpeed parity", "make prove NAME=parity-deepspeed")}
A tiny model trains under DeepSpeed on CPU processes over gloo. The reference is plain transformers with torch's
AdamW in one process. A cell has the largest relative error of any parameter's gradient at step 1 and, after the
slash, of any loss or gradient norm of {STEPS} steps. A different number of labels is masked in each sample, so
ranks and micro batches count unequal tokens. The learning rate changes at every step, and gradients are clipped. In
*unequal rows*, *t5* and *bart* the rows or pairs have unequal lengths: each micro batch is padded to its longest
row, the reference computes one row at a time without padding. In *wide* the matrices have 1 MiB a rank, the least
that DeepSpeed swaps to NVMe, and the comparison checks that swap files existed. Planted faults show that each check
can fail (tests/system/parity/faults.py).

{_bounds(columns)}

{table(("layout", "processes", *columns), rows)}

{len(cells)} of {every} cells were run, {agree} agree. – means that the planner refuses the combination, or that it
would show nothing that the row's other cells do not show.

{_resumes(resumes) if resumes else ""}
{sum(cell.seconds for cell in found.values()) / 60:.0f} minutes on two cores, which other work may have shared.
"""


def _bounds(columns: list[str]) -> str:
    of = {name: (COLUMNS[name].eps, *COLUMNS[name].bounds.values()) for name in columns}
    rows = [(name, *(f"{each:.0e}" for each in numbers)) for name, numbers in of.items()]
    return table(("column", "Adam's epsilon", "gradient", "losses", "norms"), rows)


def _resumes(resumes: Mapping[tuple[str, str], Cell]) -> str:
    rows = [
        (*pair, _bold(cell, "loss"), _bold(cell, "norm"), "exact" if cell["gradient"] == 0 else "**differs**")
        for pair, cell in resumes.items()
    ]
    return f"""## Through the exchange checkpoint

`python -m tests.system.parity.deepspeed --resumes` runs these alone. A run trains {HALF} steps on one
layout, writes an exchange checkpoint, and trains {HALF} steps on another layout. A row has the largest relative
error of loss and norm against plain torch without interruption; 1e-05 is allowed. Master weights, moments and
Adam's step count in the engine equal those on disk, bit for bit.

{table(("trained on", "went on as", "loss", "norm", "state"), rows)}

{len(resumes)} changes of layout, {sum(cell.agrees for cell in resumes.values())} agree.
"""


def _cell(cell: Cell | None) -> str:
    return "–" if cell is None else f"{_bold(cell, 'gradient')} / {_bold(cell, 'loss', 'norm')}"


def _bold(cell: Cell, *quantities: str) -> str:
    error = f"{max(cell[quantity] for quantity in quantities):.0e}"
    return error if cell.agrees else f"**{error}**"


if __name__ == "__main__":
    run(main)
