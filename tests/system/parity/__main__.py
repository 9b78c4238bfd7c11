"""Every layout, really launched, against one process of plain torch.

python -m tests.system.parity                        all layouts; exit code 1 if any disagrees
python -m tests.system.parity --only megatron        those whose name contains the word
python -m tests.system.parity --plant megatron-swap-qk  with a fault in it: must end red, exit code 1
python -m tests.system.parity --plant-all  every fault in its layout; exit code 0 if each was caught
python -m tests.system.parity --changes   instead: three launchers of one run directory, which must give the
                                                     same numbers, and runs that change engine or layout half-way
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer

import kit
from kit.emit.launch import processes_per_node
from kit.emit.run_directory import RunDirectory
from tests.support import runs
from tests.support.assets import COMMON, FAMILIES, RECIPE, model_variant, prepare
from tests.support.compare import compare_gradients, compare_runs
from tests.support.program import faults, run
from tests.support.runs import free_port
from tests.system.parity.cases import BY_NAME, CASES, CHANGES, STEPS, Case, reference
from tests.system.parity.faults import FAULTS
from tests.system.rehearsal_faults import environment

LAUNCHED = [name for name, fault in FAULTS.items() if fault.case]
"""Faults in cases that are launched; the others show on pools of processes
(tests/deepspeed, tests/megatron)."""
GRADIENTS = "gradients/step-000001.safetensors"
Found = tuple[Path, list[dict[str, Any]]]
"""Gradients of step 1, and metrics of all steps."""


def main(
    only: Annotated[str, typer.Option(help="layouts whose name contains this")] = "",
    plant: Annotated[str, typer.Option(help="one fault, in the layout where it shows")] = "",
    plant_all: Annotated[bool, typer.Option("--plant-all", help="every fault")] = False,
    changes: Annotated[bool, typer.Option("--changes", help="launchers, and changes of engine or layout")] = False,
) -> int:
    """Run, print, judge."""
    prepare()
    chosen: list[tuple[str | None, Case]] = [
        (fault, BY_NAME[FAULTS[fault].case]) for fault in faults(plant, plant_all, LAUNCHED)
    ] or [(None, case) for case in (CHANGES if changes else CASES)]
    agree = []
    with tempfile.TemporaryDirectory(prefix="kit-parity-") as scratch:
        expected = functools.cache(functools.partial(run_case, scratch=Path(scratch)))
        try:
            for fault, case in [pair for pair in chosen if only in pair[1].name]:
                before = expected(BY_NAME[case.like] if case.like else reference(case.family))
                agree.append(agrees(before, run_case(case, Path(scratch), fault), case, fault))
        except (runs.RunFailed, kit.KitError) as error:
            print(f"stopped: {error}")
            return 1
    red = agree.count(False)
    print(f"{len(agree)} cases, {red} disagree")
    return 0 if agree and red == (len(agree) if plant_all else 0) else 1


def run_case(case: Case, scratch: Path, fault: str | None = None) -> Found:
    """Emit and launch, with a fault in every rank where there is one."""
    model = FAMILIES[case.family]
    if model:
        model = (*model, f"run.model_path={model_variant(case.family, model)}")
    rundir = runs.emit(RECIPE, scratch / f"{case.name}-{fault}", [*COMMON, *model, *case.words])
    legs = 1 + len(case.then)
    if fault:
        train_planted(rundir, fault)
    elif case.launcher:
        runs.run(_by(case.launcher, rundir), rundir)
    else:
        runs.train(rundir, *(("--stop-at-step", str(STEPS // legs)) if case.then else ()))
    rows, before = runs.metrics(rundir), rundir
    for leg, words in enumerate(case.then, 2):
        then = runs.emit(RECIPE, scratch / f"{case.name}-{leg}", [*COMMON, *model, *words])
        runs.train(then, "--resume", str(before.path), "--stop-at-step", str(STEPS * leg // legs))
        rows, before = rows + runs.metrics(then), then
    return rundir.path / GRADIENTS, rows


def train_planted(rundir: RunDirectory, fault: str) -> None:
    """Train a run directory on this machine with a fault in every rank."""
    with mock.patch.dict(os.environ, environment([fault])):
        runs.train(rundir)


def _by(launcher: str, rundir: RunDirectory) -> list[str]:
    """The command that starts a run directory's processes otherwise than its launch.sh does."""
    # As launch.sh and torchrun set it. DeepSpeed's launcher leaves it open, and two threads add up in another order.
    os.environ["OMP_NUM_THREADS"] = "1"
    processes = processes_per_node(rundir.plan)
    if launcher == "torchrun":
        return runs.torchrun(processes, "kit.training", rundir.path)
    os.environ["DS_ACCELERATOR"] = "cpu"  # the launcher itself asks which accelerator there is
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(processes)]
    return [*command, "--master_port", str(free_port()), "--module", "kit.training", str(rundir.path)]


def agrees(expected: Found, found: Found, case: Case, fault: str | None) -> bool:
    """Whether every gradient of step 1, and loss and gradient norm of every step, are within the bound, as NaN is not;
    prints a line."""
    gradients, curves = compare_gradients(expected[0], found[0]), compare_runs(expected[1], found[1])
    errors = {f"gradient ({gradients.worst})": gradients.worst_relative_error}
    errors |= {key: curve.worst_relative_error for key, curve in curves.items()}
    right = all(error <= case.bound for error in errors.values())
    figures = ", ".join(f"{quantity} {error:.1e}" for quantity, error in errors.items())
    print(f"{'agrees   ' if right else 'DISAGREES'} {case.name}{f' + {fault}' if fault else ''}: {figures}", flush=True)
    return right


if __name__ == "__main__":
    run(main)
