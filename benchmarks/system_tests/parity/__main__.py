"""``python -m benchmarks.system_tests.parity``: every layout, really launched, against one process of plain torch.

python -m benchmarks.system_tests.parity                        all layouts; exit code 1 if any disagrees
python -m benchmarks.system_tests.parity --only megatron        those whose name contains the word
python -m benchmarks.system_tests.parity --plant megatron-swap-qk  with a fault in it: must end red, with exit code 1
python -m benchmarks.system_tests.parity --plant-all  every fault in its layout; exit code 0 if each was caught
python -m benchmarks.system_tests.parity --rotate 3             every third of them, others every day (CI)
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

import kit
from benchmarks.system_tests.parity.cases import CASES, COMMON, CURVE_BOUND, FAMILIES, GRADIENT_BOUND, Case, reference
from benchmarks.system_tests.parity.faults import FAULTS
from kit.emit.launch import processes_per_node
from kit.emit.run_directory import RunDirectory
from tests.support import runs
from tests.support.assets import RECIPE, model_variant, prepare
from tests.support.compare import compare_curves, compare_gradients

LAUNCHED = [name for name, fault in FAULTS.items() if fault.case]
"""Faults in cases that are launched; the others show on pools of processes
(benchmarks/system_tests/parity/megatron.py)."""
Item = TypeVar("Item")
GRADIENTS = "gradients/step-000001.safetensors"


@dataclass(frozen=True)
class Result:
    """How far a layout lies from the reference."""

    name: str
    gradient_error: float
    worst_gradient: str
    loss_error: float
    norm_error: float

    @property
    def agrees(self) -> bool:
        """Within every bound; NaN is not."""
        return self.gradient_error <= GRADIENT_BOUND and max(self.loss_error, self.norm_error) <= CURVE_BOUND


def main() -> int:
    """Run, print the table, judge."""
    arguments = _arguments()
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    prepare()
    try:
        with tempfile.TemporaryDirectory(prefix="kit-parity-") as scratch:
            if arguments.plant_all:
                plants = [
                    (fault, case) for fault in sorted(LAUNCHED) for case in CASES if case.name == FAULTS[fault].case
                ]
                if len(plants) != len(LAUNCHED):
                    console.print("[bold red]stopped:[/bold red] a fault names a layout that is not in cases.py")
                    return 1
            else:
                plants = [(arguments.plant, case) for case in _selected(arguments)]
            plants = todays(plants, arguments.rotate)
            results = []
            references: dict[str, RunDirectory] = {}
            for fault, case in plants:
                if case.family not in references:
                    references[case.family] = run_case(reference(case.family), Path(scratch), None)
                rundir = run_case(case, Path(scratch), fault)
                results.append(judge(references[case.family], rundir, f"{case.name} + {fault}" if fault else case.name))
                console.print(f"  {_line(results[-1])}", highlight=False)
    except (runs.RunFailed, kit.KitError) as error:
        console.print(f"[bold red]stopped:[/bold red] {error}", highlight=False)
        return 1
    console.print(_table(results))
    red = [result for result in results if not result.agrees]
    console.print(f"{len(results)} cases, {len(red)} disagree")
    if arguments.plant_all:
        return 0 if results and len(red) == len(results) == len(plants) else 1
    return 1 if red or not results else 0


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
        return rundir
    planted(rundir, fault)
    return rundir


def planted(rundir: RunDirectory, fault: str) -> None:
    """Train a run directory on this machine with a fault in every rank."""
    words = ("benchmarks.system_tests.parity.worker", "--plant", fault, rundir.path)
    runs.run(runs.torchrun(processes_per_node(rundir.plan), *words), rundir)


def judge(expected: RunDirectory, other: RunDirectory, name: str) -> Result:
    """All three comparisons."""
    gradients = compare_gradients(expected.path / GRADIENTS, other.path / GRADIENTS)
    loss, norm = (compare_curves(runs.metrics(expected), runs.metrics(other), key) for key in ("loss", "grad_norm"))
    return Result(
        name, gradients.worst_relative_error, gradients.worst_name, loss.worst_relative_error, norm.worst_relative_error
    )


def _selected(arguments: argparse.Namespace) -> list[Case]:
    if arguments.plant:
        return [case for case in CASES if case.name == FAULTS[arguments.plant].case]
    return [case for case in CASES if arguments.only in case.name]


def _line(result: Result) -> str:
    verdict = "[green]agrees[/green]" if result.agrees else "[bold red]DISAGREES[/bold red]"
    return f"{verdict} {result.name}: gradients {result.gradient_error:.1e}, loss {result.loss_error:.1e}"


def _table(results: list[Result]) -> Table:
    table = Table(title=f"Against plain torch; bounds: gradients {GRADIENT_BOUND:.0e}, curves {CURVE_BOUND:.0e}")
    for column in ("layout", "worst gradient", "at", "loss", "gradient norm", ""):
        table.add_column(column, overflow="fold")
    for r in results:
        verdict = "agrees" if r.agrees else "DISAGREES"
        errors = (f"{r.gradient_error:.1e}", r.worst_gradient, f"{r.loss_error:.1e}", f"{r.norm_error:.1e}")
        table.add_row(r.name, *errors, verdict)
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.system_tests.parity", description=(__doc__ or "").splitlines()[0]
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--only", default="", help="layouts whose name contains this")
    group.add_argument("--plant", choices=sorted(LAUNCHED), help="one fault, in the layout where it shows")
    group.add_argument("--plant-all", action="store_true", help="every fault")
    parser.add_argument("--rotate", type=int, default=1, metavar="N", help="every Nth of them, others every day")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
