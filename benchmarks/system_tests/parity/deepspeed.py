"""``python -m benchmarks.system_tests.parity.deepspeed``: every layout of the DeepSpeed engine, against transformers
and torch.

python -m benchmarks.system_tests.parity.deepspeed                       both tables; exit code 1 if anything disagrees
python -m benchmarks.system_tests.parity.deepspeed --rows Ulysses2 --columns llama
python -m benchmarks.system_tests.parity.deepspeed --resumes             only the changes of layout
python -m benchmarks.system_tests.parity.deepspeed --plant hpz-stale-copy  with a fault
python -m benchmarks.system_tests.parity.deepspeed --plant-all every fault where it must show; exit code 0 if all were
caught python -m benchmarks.system_tests.parity.deepspeed --write docs/parity.md

A tiny model is trained in one process of plain transformers and torch's AdamW, then on pools of gloo processes, which
import DeepSpeed once for all layouts of their size. Labels are masked, a different number in each sample. Compared are
each parameter's gradient at step 1 and the loss and gradient norm of each step; and after a change of layout through
the masters and moments of the checkpoint, bit for bit, and the losses and norms of the steps that follow.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from benchmarks.page import ROOT, write_json
from benchmarks.system_tests.parity.deepspeed_layouts import (
    COLUMNS,
    EXACT,
    PLANTED,
    RESUMES,
    ROWS,
    Cell,
    Column,
    Row,
)
from benchmarks.system_tests.parity.deepspeed_page import page
from tests.deepspeed import cases, plain
from tests.training import tiny
from tests.workers import WorkerError, pool

STEPS = 20
HALF = 5
"""Steps before an exchange checkpoint, and after it."""
LIMIT_S = 300
RESULTS = ROOT / "benchmarks" / "results" / "deepspeed-parity.json"


def main() -> int:
    """Run, print, judge."""
    arguments = _arguments()
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="kit-parity-") as scratch:
        bench = _Bench(Path(scratch))
        if arguments.plant or arguments.plant_all:
            names = list(PLANTED) if arguments.plant_all else [arguments.plant]
            planted = [bench.plant(name) for name in names]
            caught = [not cell.agrees and not cell.failure for cell in planted]  # one that cannot run was not seen
            print(f"{len(names)} faults planted, {sum(caught)} caught")
            return (0 if all(caught) else 1) if arguments.plant_all else int(any(caught))
        cells = [
            (row, column)
            for row in ROWS
            for column in ROWS[row].columns
            if arguments.rows in row and arguments.columns in column and not arguments.resumes
        ]
        pairs = [pair for pair in RESUMES if arguments.rows in " → ".join(pair) and arguments.columns in "llama"]
        found: list[Cell] = []
        for one, other in [*cells, *pairs]:
            began = time.monotonic()
            run = bench.cell if other in COLUMNS else bench.resume
            cell = dataclasses.replace(run(one, other), seconds=time.monotonic() - began)
            found.append(cell)
            if arguments.write:
                _keep(one, other, cell)
                arguments.write.write_text(page(_kept(), STEPS, HALF), encoding="utf-8")
    bad = [cell for cell in found if not cell.agrees]
    print(f"{len(cells)} cells, {len(pairs)} resumes, {len(bad)} disagree")
    return 1 if bad or not found else 0


def _keep(one: str, other: str, cell: Cell) -> None:
    """Beside those of earlier runs: a run of some rows replaces theirs."""
    measured = {key: getattr(cell, key) for key in ("gradient", "loss", "norm", "seconds")}
    everyone = _read() | {f"{one} | {other}": measured}
    write_json(RESULTS, everyone)


def _kept() -> dict[tuple[str, str], Cell]:
    """What rows and resumes of today have measured; those that are gone are left out."""
    measured = _read()
    columns = {(row, column): COLUMNS[column].bounds for row in ROWS for column in ROWS[row].columns}
    bounds = columns | dict.fromkeys(RESUMES, EXACT)
    return {pair: Cell(bounds[pair], **measured[" | ".join(pair)]) for pair in bounds if " | ".join(pair) in measured}


def _read() -> dict[str, dict[str, float]]:
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


class _Bench:
    """References and pools, made when first asked for and kept: up to twelve processes, half a GiB each."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._number = scratch, itertools.count()
        self._references: dict[Any, tuple[Path, plain.Curve]] = {}

    def plant(self, fault: str) -> Cell:
        """The cell or resume in which a fault must show, with it."""
        row, other = PLANTED[fault]
        return self.cell(row, other, fault) if other in COLUMNS else self.resume(row, other, fault)

    def cell(self, name: str, column_name: str, fault: str | None = None) -> Cell:
        """Train, compare, print a line."""
        row, column = ROWS[name], COLUMNS[column_name]
        start, expected = self._reference(column, STEPS)
        try:
            found = self._run(
                row, cases.train, self._plan(row, column), start, self._directory(), STEPS, fault, row.zero
            )
        except WorkerError as error:
            return self._say(f"{name}, {column_name}", fault, Cell(column.bounds, failure=str(error)))
        if row.swaps and not found.swapped_bytes:
            return self._say(f"{name}, {column_name}", fault, Cell(column.bounds, failure="nothing was on NVMe"))
        cell = Cell(
            column.bounds,
            plain.gradient_error(found, expected),
            plain.curve_error(found.losses, expected.losses),
            plain.curve_error(found.norms, expected.norms),
        )
        return self._say(f"{name}, {column_name}", fault, cell)

    def resume(self, before: str, after: str, fault: str | None = None) -> Cell:
        """HALF steps on one row, an exchange checkpoint, HALF on another: those of plain torch without a break."""
        first, then, directory = ROWS[before], ROWS[after], self._directory()
        column = COLUMNS["wide" if first.swaps or then.swaps else "llama"]
        start, expected = self._reference(column, 2 * HALF)
        try:
            self._run(first, cases.leave, self._plan(first, column), start, directory, HALF, first.zero)
            exchange, plan = directory / "exchange", self._plan(then, column)
            found, different = self._run(then, cases.go_on, plan, exchange, directory, HALF, fault, then.zero)
        except WorkerError as error:
            return self._say(f"{before} → {after}", fault, Cell(EXACT, failure=str(error)))
        cell = Cell(
            EXACT,
            float("inf") if different else 0.0,
            plain.curve_error(found.losses, expected.losses[HALF:]),
            plain.curve_error(found.norms, expected.norms[HALF:]),
        )
        return self._say(f"{before} → {after}", fault, cell)

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

    @staticmethod
    def _say(what: str, fault: str | None, cell: Cell) -> Cell:
        verdict = "agrees   " if cell.agrees else "DISAGREES"
        errors = cell.failure or f"gradient {cell.gradient:.1e}, loss {cell.loss:.1e}, norm {cell.norm:.1e}"
        print(f"{verdict} {what}{f' + {fault}' if fault else ''}: {errors}", flush=True)
        return cell


def _arguments() -> argparse.Namespace:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.system_tests.parity.deepspeed", description=summary)
    parser.add_argument("--rows", default="", help="those whose name contains this")
    parser.add_argument("--columns", default="", help="those whose name contains this")
    parser.add_argument("--resumes", action="store_true", help="only the changes of layout")
    parser.add_argument("--write", type=Path, help="where the page goes; cells that are not run now keep their figures")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--plant", choices=sorted(PLANTED), help="one fault, where it must show")
    group.add_argument("--plant-all", action="store_true", help="every fault")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
