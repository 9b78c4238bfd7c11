"""The emitted batch script in a real Slurm of two nodes, beside one process: ``python -m benchmarks.slurm [NAME…]``.

    signal    the signal that Slurm sends before a limit, sent in the middle: a checkpoint, the queue, resumed there
    limit     the same by Slurm's own clock, two minutes' limit with a minute's notice: for an idle machine
    requeue   scontrol requeue in the middle, as preemption does: resumed, the same curve
    srun      the deepspeed launcher in its slurm mode, inside an allocation

slurmctld, two slurmd and munge run in namespaces (``benchmarks/hosts/lab.py``) and go with them. Exit code 1 where a
curve leaves its bound or a job takes another way, 3 where this machine cannot have them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import runs
from benchmarks.assets import RECIPE, prepare
from benchmarks.hosts import lab
from benchmarks.hosts.judge import BOUNDS, agree, differences
from benchmarks.slurm.cluster import PROGRAMS, Slurm, start
from kit.emit.run_directory import RunDirectory
from kit.rehearsal.processes import metrics

LIMIT_S = 420
COMMON = ("run.logging.gradients_at_steps=[]", "job.global_batch_size=12", "layout.micro_batch_size=2")
TORCH, ZERO2 = ("layout.engine=torch",), ("layout.engine=deepspeed", "layout.zero_stage=2")
LONG = 400
"""Steps of the run that the signal interrupts: more than two minutes' limit less a minute's notice."""
SHORT = 60
SAVE_EVERY, REQUEUE_AT = 20, 25


def main() -> int:
    """Enter namespaces, start Slurm, run, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], metavar="NAME")
    chosen = parser.parse_args().names or list(CASES)
    if not lab.inside():
        try:
            lab.check(PROGRAMS)
        except lab.NoLab as error:
            print(f"NOT RUN: {error}", file=sys.stderr)
            return 3
        prepare()
        return lab.enter("benchmarks.slurm", sys.argv[1:])
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="kit-slurm-") as scratch, lab.hosts(["node-0", "node-1"]) as hosts:
        root = Path(scratch)
        slurm = start(hosts, root)
        references: dict[int, RunDirectory] = {}
        print(f"| job | way | steps | difference of loss | of gradient norm | seconds |\n{'|---' * 6}|", flush=True)
        for name in chosen:
            begin = time.monotonic()
            try:
                found, way, steps = CASES[name](slurm, root)
            except (runs.RunFailed, RuntimeError) as error:
                print(f"FAILED {name}: {error}", flush=True)
                wrong += 1
                continue
            spent = time.monotonic() - begin
            if steps not in references:
                references[steps] = runs.emit(RECIPE, root / f"reference-{steps}", [*COMMON, f"run.steps={steps}"])
                runs.train(references[steps])
            worst = differences(metrics(found.path), metrics(references[steps].path), steps)
            wrong += not agree(worst)
            print(
                f"| {name} | {way} | {steps} | {worst['loss']:.1e} | {worst['grad_norm']:.1e} | {spent:.0f} |",
                flush=True,
            )
    print(f"bounds {BOUNDS}; {len(chosen)} jobs, {wrong} wrong")
    return 1 if wrong else 0


def signalled(slurm: Slurm, root: Path) -> tuple[RunDirectory, str, int]:
    """``scancel --batch --signal=USR1``: the batch script hears what ``--signal=B:USR1@…`` would send."""
    rundir = _emit(root / "signal", TORCH, SHORT, SHORT)
    number = _submit(slurm, rundir)
    _until(slurm, rundir, number, lambda job: _step(rundir) >= REQUEUE_AT)
    slurm.run("scancel", "--batch", "--signal=USR1", number)
    return rundir, f"signalled, {_resumed_where_it_stopped(slurm, rundir, number, SHORT)}", SHORT


def limited(slurm: Slurm, root: Path) -> tuple[RunDirectory, str, int]:
    """Two minutes' limit, a minute's notice."""
    rundir = _emit(root / "limit", TORCH, LONG, LONG)
    number = _submit(slurm, rundir, "--time=2", "--signal=B:USR1@60")
    return rundir, f"near its limit, {_resumed_where_it_stopped(slurm, rundir, number, LONG)}", LONG


def _resumed_where_it_stopped(slurm: Slurm, rundir: RunDirectory, number: str, steps: int) -> str:
    """Wait for it to save, queue and end; every step made once, none lost. In the queue the job gets more time, and is
    spared the two minutes that Slurm lets a requeued job wait."""
    _until(slurm, rundir, number, lambda job: job["Restarts"] == "1" and job["JobState"] == "PENDING")
    stopped = _step(rundir)
    slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now", "TimeLimit=30")
    _finish(slurm, rundir, number)
    made = [row["step"] for row in metrics(rundir.path)]
    if made != list(range(1, steps + 1)) or stopped >= steps:
        raise runs.RunFailed(f"stopped at {stopped} of {steps}; steps were lost or made twice: {len(made)} rows")
    return f"saved at step {stopped}, queued again, resumed"


def requeued(slurm: Slurm, root: Path) -> tuple[RunDirectory, str, int]:
    """``scontrol requeue`` while it trains."""
    rundir = _emit(root / "requeue", ZERO2, SHORT, SAVE_EVERY)
    number = _submit(slurm, rundir)
    _until(slurm, rundir, number, lambda job: _step(rundir) >= REQUEUE_AT)
    slurm.run("scontrol", "requeue", number)
    stopped = _step(rundir)
    _until(slurm, rundir, number, lambda job: job["JobState"] == "PENDING")
    slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    _finish(slurm, rundir, number)
    return rundir, f"requeued at step {stopped}, resumed", SHORT


def launched(slurm: Slurm, root: Path) -> tuple[RunDirectory, str, int]:
    """``LAUNCHER=slurm launch_hosts.sh`` inside of an allocation."""
    rundir = _emit(root / "srun", ZERO2, SHORT, SHORT)
    (rundir.path / "hostfile").write_text("node-0 slots=1\nnode-1 slots=1\n", encoding="ascii")
    script = "LAUNCHER=slurm ./launch_hosts.sh"
    words = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--time=20", f"--wrap={script}"]
    number = slurm.run(*_environment(), *words, cwd=rundir.path).strip()
    _finish(slurm, rundir, number)
    return rundir, "deepspeed --launcher slurm", SHORT


CASES: dict[str, Callable[[Slurm, Path], tuple[RunDirectory, str, int]]] = {
    "signal": signalled,
    "limit": limited,
    "requeue": requeued,
    "srun": launched,
}


def _emit(directory: Path, engine: tuple[str, ...], steps: int, save_every: int) -> RunDirectory:
    cluster = directory.with_suffix(".yaml")
    cluster.write_text("node: 1xcpu\nnum_nodes: 2\ngpus_per_node: 1\ninter_node_gbytes_per_s: 1\n", encoding="utf-8")
    words = [*COMMON, *engine, f"run.steps={steps}", f"run.checkpoint.every_steps={save_every}", f"cluster={cluster}"]
    return runs.emit(RECIPE, directory, words)


def _submit(slurm: Slurm, rundir: RunDirectory, *words: str) -> str:
    return slurm.run(*_environment(), "sbatch", "--parsable", *words, "slurm.sbatch", cwd=rundir.path).strip()


def _environment() -> list[str]:
    """What a user's shell would hold; sbatch hands it on."""
    path = f"PATH={Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    root = Path(__file__).resolve().parents[2]
    return ["env", path, f"PYTHON={sys.executable}", f"PYTHONPATH={root}", "DS_ACCELERATOR=cpu"]


def _until(slurm: Slurm, rundir: RunDirectory, number: str, reached: Callable[[dict[str, str]], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        job = slurm.job(number)
        if reached(job):
            return
        if job["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "PREEMPTED"):
            raise runs.RunFailed(f"job is {job['JobState']}: {_log(rundir)}")
        if time.monotonic() > deadline:
            raise runs.RunFailed(f"job is {job['JobState']} after {LIMIT_S} s: {_log(rundir)}")
        time.sleep(0.2)


def _finish(slurm: Slurm, rundir: RunDirectory, number: str) -> None:
    _until(slurm, rundir, number, lambda job: job["JobState"] == "COMPLETED")


def _step(rundir: RunDirectory) -> int:
    rows = metrics(rundir.path)
    return int(rows[-1]["step"]) if rows else 0


def _log(rundir: RunDirectory) -> str:
    text = "".join(file.read_text(errors="replace") for file in sorted(rundir.path.glob("slurm-*.out")))
    return "\n".join(text.splitlines()[-30:])


if __name__ == "__main__":
    sys.exit(main())
