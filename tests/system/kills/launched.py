"""``python -m tests.system.kills.launched``: torchrun restarts what was killed, and what was stopped comes
back.

Three ways to be interrupted, each compared bit for bit with a run that was let be:

- ``restart``: ``torchrun --max-restarts``, ``kill -9`` of one rank in the middle; torchrun starts the ranks again.
- ``sigterm`` and ``sigusr1``: a signal to torchrun alone, which hands it on; the ranks save and leave; started again.

Exit code 1 where a run does not come to the same curve.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

from kit.rehearsal import processes
from kit.rehearsal.processes import metrics, start
from tests.support import program, runs
from tests.support.program import Names, chosen
from tests.system.kills.__main__ import compare
from tests.system.kills.cases import CASES, emit, prepare

LIMIT_S = 420
KILL_AT = 8
STEPS = 400
"""Steps of milliseconds: a signal takes some of them to arrive."""
CASE = CASES[0]
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def main(names: Names) -> int:
    """0 where every way comes to the same."""
    ways: dict[str, Callable[[Path], str]] = {
        "restart": restart,
        "sigterm": lambda run: stop(run, signal.SIGTERM),
        "sigusr1": lambda run: stop(run, signal.SIGUSR1),
    }
    some, wrong = chosen(names, ways), 0
    with tempfile.TemporaryDirectory(prefix="kit-launched-") as scratch:
        data = prepare(Path(scratch) / "data")
        whole = emit(CASE, data.with_name("whole"), data, STEPS).path
        _finish(torchrun(whole), whole)
        for name in some:
            run = emit(CASE, data.with_name(name), data, STEPS).path
            told, differs = ways[name](run), compare(whole, run)
            wrong += bool(differs)
            print(f"{'DIFFERS' if differs else 'equal  '} {name}: {told}{differs and f'; {differs}'}", flush=True)
    print(f"{len(some) - wrong} of {len(some)} interrupted runs equal bit for bit")
    return int(wrong > 0)


def restart(run: Path) -> str:
    """One rank is killed; the same torchrun brings the run to its end."""
    job = torchrun(run, "--max-restarts", "2")
    runs.wait_for_step([job], run, KILL_AT, LIMIT_S)
    _ranks(job)[1].kill()
    _finish(job, run)
    lines = (run / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    resumes = ", ".join(line for line in lines if line.startswith("resumed after")) or "started from the beginning"
    return f"one rank killed, {resumes} by torchrun itself"


def stop(run: Path, number: signal.Signals) -> str:
    """The signal goes to torchrun; its ranks save, and leave the mark of a run that waits."""
    job = torchrun(run, "--signals-to-handle", SIGNALS, "--shutdown-timeout", "120")
    runs.wait_for_step([job], run, KILL_AT, LIMIT_S)
    os.kill(job.pid, number)
    code = job.wait(timeout=LIMIT_S)
    if not (run / "stopped").exists():
        return f"{number.name} left no mark (torchrun's exit code {code}): {processes.tail(run)}"
    reached, saved = metrics(run)[-1]["step"], (run / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    _finish(torchrun(run), run)
    return f"{number.name} after step {reached}, {saved} written, started again"


def torchrun(run: Path, *words: str) -> subprocess.Popen[bytes]:
    """torchrun for the worker on a run directory."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *words]
    # As launch.sh sets it (kit/emit/environment.py).
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return start([*command, "-m", "kit.training", str(run), "--resume", "auto"], run / "log.txt")


def _ranks(job: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [child for child in psutil.Process(job.pid).children() if "kit.training" in child.cmdline()]


def _finish(job: subprocess.Popen[bytes], run: Path) -> None:
    runs.wait(job, run / "log.txt", LIMIT_S)


if __name__ == "__main__":
    program.run(main)
