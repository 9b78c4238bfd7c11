"""Every layout, really launched, against one process of plain torch.

python -m benchmarks.system_tests.parity                        all layouts; exit code 1 if any disagrees
python -m benchmarks.system_tests.parity --only megatron        those whose name contains the word
python -m benchmarks.system_tests.parity --plant megatron-swap-qk  with a fault in it: must end red, exit code 1
python -m benchmarks.system_tests.parity --plant-all  every fault in its layout; exit code 0 if each was caught
python -m benchmarks.system_tests.parity --rotate 3             every third of them, others every day (CI)
"""

from __future__ import annotations

import datetime
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import kit
from benchmarks.program import Item, faults, run
from benchmarks.system_tests.parity.cases import CASES, COMMON, FAMILIES, Case, reference
from benchmarks.system_tests.parity.cell import BOUND, Cell
from benchmarks.system_tests.parity.faults import FAULTS
from kit.emit.launch import processes_per_node
from kit.emit.run_directory import RunDirectory
from tests.support import runs
from tests.support.assets import RECIPE, model_variant, prepare
from tests.support.compare import compare_gradients, compare_runs

LAUNCHED = [name for name, fault in FAULTS.items() if fault.case]
"""Faults in cases that are launched; the others show on pools of processes
(benchmarks/system_tests/parity/megatron.py)."""
GRADIENTS = "gradients/step-000001.safetensors"


def main(
    only: Annotated[str, typer.Option(help="layouts whose name contains this")] = "",
    plant: Annotated[str, typer.Option(help="one fault, in the layout where it shows")] = "",
    plant_all: Annotated[bool, typer.Option("--plant-all", help="every fault")] = False,
    rotate: Annotated[int, typer.Option(help="every so many of them, others every day")] = 1,
) -> int:
    """Run, print, judge."""
    prepare()
    by_name = {case.name: case for case in CASES}
    chosen: list[tuple[str | None, Case]] = [
        (fault, by_name[FAULTS[fault].case]) for fault in faults(plant, plant_all, LAUNCHED)
    ] or [(None, case) for case in CASES]
    cells = []
    with tempfile.TemporaryDirectory(prefix="kit-parity-") as scratch:
        expected = functools.cache(lambda family: run_case(reference(family), Path(scratch), None))
        try:
            for fault, case in todays([pair for pair in chosen if only in pair[1].name], rotate):
                before = expected(case.family)
                cells.append(judge(before, run_case(case, Path(scratch), fault)).told(case.name, fault))
        except (runs.RunFailed, kit.KitError) as error:
            print(f"stopped: {error}")
            return 1
    red = sum(not cell.agrees for cell in cells)
    print(f"{len(cells)} cases, {red} disagree")
    if plant_all:
        return 0 if cells and red == len(cells) else 1
    return 1 if red or not cells else 0


def todays(items: Sequence[Item], parts: int, day: int | None = None) -> list[Item]:
    """Every ``parts``-th of them; ``parts`` days in a row have all. ``day``: its number in the calendar, today's if
    None."""
    first = (datetime.date.today().toordinal() if day is None else day) % parts
    return list(items[first::parts])


def run_case(case: Case, scratch: Path, fault: str | None) -> RunDirectory:
    """Emit and launch; with a fault, the same processes run the planted worker."""
    model = FAMILIES[case.family]
    if model:
        model = (*model, f"run.model_path={model_variant(case.family, model)}")
    rundir = runs.emit(RECIPE, scratch / f"{case.name}-{fault}", [*COMMON, *model, *case.words])
    if fault is None:
        runs.train(rundir)
    else:
        train_planted(rundir, fault)
    return rundir


def train_planted(rundir: RunDirectory, fault: str) -> None:
    """Train a run directory on this machine with a fault in every rank."""
    words = ("benchmarks.system_tests.parity.worker", "--plant", fault, rundir.path)
    runs.run(runs.torchrun(processes_per_node(rundir.plan), *words), rundir)


def judge(expected: RunDirectory, other: RunDirectory) -> Cell:
    """Every gradient of step 1; loss and gradient norm of every step."""
    gradients = compare_gradients(expected.path / GRADIENTS, other.path / GRADIENTS)
    curves = compare_runs(runs.metrics(expected), runs.metrics(other))
    errors = {"gradient": gradients.worst_relative_error}
    errors |= {key: curve.worst_relative_error for key, curve in curves.items()}
    return Cell(dict.fromkeys(errors, BOUND), errors, {"gradient": gradients.worst_name})


if __name__ == "__main__":
    run(main)
