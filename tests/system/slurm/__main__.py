"""The emitted batch script in a real Slurm of two nodes, beside one process: ``python -m
tests.system.slurm [NAME…]``.

    limit     Slurm's own clock: two minutes' limit, a minute's notice; a checkpoint, the queue, resumed there
    signal    the same signal by hand, in the middle
    preempt   a job of a partition with a higher priority takes the nodes: queued again, resumed, the same curve
    srun      the deepspeed launcher in its slurm mode, inside an allocation

slurmctld, two slurmd and munge run in namespaces (``tests/support/namespaces.py``) and go with them. Exit
code 1 where a curve leaves its bound or a job takes another way, 3 where this machine cannot have them.
"""

from __future__ import annotations

import functools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kit.emit.run_directory import RunDirectory
from kit.rehearsal.processes import metrics
from tests.support import ROOT, namespaces, runs
from tests.support.assets import RECIPE, prepare
from tests.support.program import Names, chosen, run
from tests.system.hosts.cases import TORCH, ZERO2, beside, nodes
from tests.system.slurm.cluster import PROGRAMS, Slurm, start

LIMIT_S = 420
COMMON = ("run.logging.gradients_at_steps=[]", "job.global_batch_size=12", "layout.micro_batch_size=2")
STEPS = 60
SAVE_EVERY, INTERRUPT_AT = 20, 25
TO_THE_LIMIT_S, TO_THE_END_S = 2.5, 0.5
"""Sleep at each step of a job's first life: all steps take longer than two minutes; the steps after the one at which
it is interrupted take longer than Slurm needs to do so."""
SLOW = Path(__file__).with_name("slow")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
ENDED_S, SETTLED_S = 10, 8
"""A job that is in one of these states for so long stays there."""


def main(names: Names) -> int:
    """Enter namespaces, start Slurm, run, judge."""
    jobs = chosen(names, CASES)
    return namespaces.main("tests.system.slurm", lambda: run_all(jobs), PROGRAMS, before=prepare)


def run_all(jobs: Sequence[str]) -> int:
    """These jobs beside one reference; 0 where all agree."""
    with tempfile.TemporaryDirectory(prefix="kit-slurm-") as scratch, namespaces.hosts(["node-0", "node-1"]) as hosts:
        root = Path(scratch)
        slurm = start(hosts, root)
        reference = runs.emit(RECIPE, root / "reference", [*COMMON, f"run.steps={STEPS}"])
        launches = {name: functools.partial(CASES[name], slurm, root / name) for name in jobs}
        return 1 if beside(reference, launches, ("job",), STEPS) else 0


def limited(slurm: Slurm, place: Path) -> tuple[RunDirectory, tuple[str]]:
    """Two minutes' limit, a minute's notice; Slurm may send it half a minute earlier."""
    rundir = _emit(place, TORCH, STEPS)
    number = _submit(slurm, rundir, "--time=2", "--signal=B:USR1@60", sleep_s=TO_THE_LIMIT_S)
    way = _resumed_where_it_stopped(slurm, rundir, number)
    spent = next(line for line in _lines(rundir) if line.startswith("stopped before the time limit"))
    return rundir, (f"--time=2, --signal=B:USR1@60: {way} ({spent.split(': ')[0]})",)


def signalled(slurm: Slurm, place: Path) -> tuple[RunDirectory, tuple[str]]:
    """``scancel --batch --signal=USR1``: the batch script hears what ``--signal=B:USR1@…`` would send."""
    rundir = _emit(place, TORCH, STEPS)
    number = _submit(slurm, rundir, sleep_s=TO_THE_END_S)
    _until(slurm, rundir, number, lambda job: _step(rundir) >= INTERRUPT_AT)
    slurm.run("scancel", "--batch", "--signal=USR1", number)
    return rundir, (f"signalled: {_resumed_where_it_stopped(slurm, rundir, number)}",)


def preempted(slurm: Slurm, place: Path) -> tuple[RunDirectory, tuple[str]]:
    """A job of the partition ``urgent`` wants both nodes for itself while ours trains."""
    rundir = _emit(place, ZERO2, SAVE_EVERY)
    number = _submit(slurm, rundir, sleep_s=TO_THE_END_S)
    _until(slurm, rundir, number, lambda job: _step(rundir) >= INTERRUPT_AT)
    words = ["--partition=urgent", "--nodes=2", "--exclusive", "--time=5", "--output=/dev/null", "--wrap=sleep 2"]
    urgent = slurm.run("sbatch", "--parsable", *words).strip()
    _until(slurm, rundir, number, _is_queued_again)
    stopped = _step(rundir)
    _until(slurm, rundir, urgent, lambda job: job["JobState"] == "COMPLETED")
    _finish(slurm, rundir, number)
    return rundir, (f"preempted at step {stopped} by a job of higher priority, resumed after it",)


def launched(slurm: Slurm, place: Path) -> tuple[RunDirectory, tuple[str]]:
    """``LAUNCHER=slurm launch_hosts.sh`` inside of an allocation."""
    rundir = _emit(place, ZERO2, STEPS)
    (rundir.path / "hostfile").write_text("node-0 slots=1\nnode-1 slots=1\n", encoding="ascii")
    words = ["--nodes=2", "--ntasks-per-node=1", "--time=20", "--wrap=LAUNCHER=slurm ./launch_hosts.sh"]
    _finish(slurm, rundir, slurm.run(*_environment(), "sbatch", "--parsable", *words, cwd=rundir.path).strip())
    return rundir, ("deepspeed --launcher slurm",)


def _resumed_where_it_stopped(slurm: Slurm, rundir: RunDirectory, number: str) -> str:
    """Wait for it to save, queue and end; every step made once, none lost."""
    _until(slurm, rundir, number, _is_queued_again)
    stopped = _step(rundir)
    _finish(slurm, rundir, number)
    lives = int(slurm.job(number)["Restarts"]) + 1
    made = [row["step"] for row in metrics(rundir.path)]
    if made != list(range(1, STEPS + 1)) or not 0 < stopped < STEPS:
        raise runs.RunFailed(f"stopped at {stopped} of {STEPS}; steps were lost or made twice: {len(made)} rows")
    return f"saved at step {stopped}, queued again, resumed ({lives} lives), every step made once"


CASES: dict[str, Callable[[Slurm, Path], tuple[RunDirectory, tuple[str]]]] = {
    "limit": limited,
    "signal": signalled,
    "preempt": preempted,
    "srun": launched,
}


def _emit(directory: Path, engine: tuple[str, ...], save_every: int) -> RunDirectory:
    steps = (f"run.steps={STEPS}", f"run.checkpoint.every_steps={save_every}")
    return runs.emit(RECIPE, directory, [*COMMON, *engine, *steps, nodes(directory, 2)])


def _submit(slurm: Slurm, rundir: RunDirectory, *words: str, sleep_s: float) -> str:
    return slurm.run(*_environment(sleep_s), "sbatch", "--parsable", *words, "slurm.sbatch", cwd=rundir.path).strip()


def _environment(sleep_s: float = 0.0) -> list[str]:
    """What a user's shell would hold; sbatch hands it on."""
    path = f"PATH={Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    words = ["env", path, f"PYTHON={sys.executable}", "DS_ACCELERATOR=cpu"]
    return [
        *words,
        *([f"PYTHONPATH={SLOW}:{ROOT}", f"KIT_SLOW_STEP_S={sleep_s}"] if sleep_s else [f"PYTHONPATH={ROOT}"]),
    ]


def _until(slurm: Slurm, rundir: RunDirectory, number: str, reached: Callable[[dict[str, str]], bool]) -> None:
    """Raises ``RunFailed`` where the job ends in another way: a job that queues itself again passes through FAILED."""
    deadline, ended = time.monotonic() + LIMIT_S, None
    while True:
        job, now = slurm.job(number), time.monotonic()
        if reached(job):
            return
        ended = (ended or now) if job["JobState"] in ENDED else None
        if now > deadline or (ended is not None and now > ended + ENDED_S):
            told = f"{job['JobState']}, reason {job['Reason']}, {job['Restarts']} restarts, exit code {job['ExitCode']}"
            raise runs.RunFailed("\n".join([f"job is {told}:", *_lines(rundir)[-30:], slurm.controller_log(number)]))
        time.sleep(0.2)


def _is_queued_again(job: dict[str, str]) -> bool:
    return job["Restarts"] != "0" and job["JobState"] == "PENDING"


def _finish(slurm: Slurm, rundir: RunDirectory, number: str) -> None:
    """To its end; of the two minutes that Slurm lets a requeued job wait it is spared all but ``SETTLED_S``, each time:
    begun at once, it would be ended by the late word of its former life's exit."""
    due: dict[str, float] = {}

    def reached(job: dict[str, str]) -> bool:
        life, now = job["Restarts"], time.monotonic()
        if _is_queued_again(job) and now > due.setdefault(life, now + SETTLED_S):
            slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")
            due[life] = math.inf
        return job["JobState"] == "COMPLETED"

    _until(slurm, rundir, number, reached)


def _step(rundir: RunDirectory) -> int:
    rows = metrics(rundir.path)
    return int(rows[-1]["step"]) if rows else 0


def _lines(rundir: RunDirectory) -> list[str]:
    return "".join(file.read_text(errors="replace") for file in sorted(rundir.path.glob("slurm-*.out"))).splitlines()


if __name__ == "__main__":
    run(main)
