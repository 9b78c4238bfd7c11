"""``python -m benchmarks.system_tests.parity.launchers``: one run directory, three launchers, the same numbers.

accelerate launch (what launch.sh does for DeepSpeed), DeepSpeed's own launcher and torchrun start the same worker on
CPU processes. Losses and gradient norms must be equal to the last digit, on ZeRO-3 and on ZeRO over Megatron's tensor
parallelism with data parallelism beside it; exit code 1 where they are not.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from benchmarks.system_tests.parity.cases import COMMON
from kit.emit.run_directory import RunDirectory
from kit.rehearsal.processes import free_port
from tests.support import runs
from tests.support.assets import RECIPE, prepare

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ZeRO-3": (2, ("layout.zero_stage=3",)),
    "ZeRO-2 over Megatron TP2·dp2, optimizer on the host": (
        4,
        ("layout.zero_stage=2", "layout.implementation=local", "layout.tp=2", "layout.offload_optimizer=cpu"),
    ),
}
"""Name → processes, and what selects it."""
STEPS = 3


def main() -> int:
    """Run all, print a line each, judge."""
    prepare()
    disagree = 0
    with tempfile.TemporaryDirectory(prefix="kit-launchers-") as scratch:
        for number, (layout, (processes, words)) in enumerate(LAYOUTS.items()):
            found = {}
            for launcher in ("accelerate launch", "deepspeed", "torchrun"):
                out = Path(scratch) / f"{number}-{launcher.partition(' ')[0]}"
                common = [*COMMON, f"run.steps={STEPS}", f"cluster={processes}xcpu", "layout.engine=deepspeed"]
                rundir = runs.emit(RECIPE, out, [*common, "layout.micro_batch_size=4", *words])
                start(rundir, launcher, processes)
                found[launcher] = [(row["loss"], row["grad_norm"]) for row in runs.metrics(rundir)]
            for launcher, rows in found.items():
                equal = len(rows) == STEPS and rows == found["torchrun"]
                disagree += not equal
                print(f"{'equal' if equal else 'DIFFERS'}  {layout}, {launcher}: losses {[loss for loss, _ in rows]}")
    return 1 if disagree else 0


def start(rundir: RunDirectory, launcher: str, processes: int) -> None:
    """To its end. Raises RunFailed where that is not clean."""
    # As launch.sh and torchrun set it. DeepSpeed's launcher leaves it open, and two threads add up in another order.
    os.environ["OMP_NUM_THREADS"] = "1"
    if launcher == "accelerate launch":
        return runs.train(rundir)
    if launcher == "torchrun":
        return runs.run(runs.torchrun(processes, "kit.training", rundir.path), rundir)
    os.environ["DS_ACCELERATOR"] = "cpu"  # the launcher itself asks which accelerator there is
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(processes)]
    command += ["--master_port", str(free_port()), "--module", "kit.training", str(rundir.path)]
    return runs.run(command, rundir)


if __name__ == "__main__":
    sys.exit(main())
