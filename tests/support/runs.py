"""Start a run the way a user does, wait for it, and kill it where the demo says so."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

import kit
from kit.emit.run_directory import RunDirectory, write
from kit.errors import EngineError
from kit.rehearsal import processes
from kit.rehearsal.processes import start
from tests.support import ROOT

RUN_LIMIT_S = 300
"""No run of these takes a minute on an idle machine; a hang must not last longer than this."""


class RunFailed(Exception):
    """A run ended with another exit code than expected; carries the end of its log."""


def emit(recipe: Path, out: Path, overrides: Sequence[str]) -> RunDirectory:
    """Recipe → plan → run directory."""
    loaded = kit.load_recipe(recipe, overrides)
    assert loaded.run is not None
    return write(kit.plan(loaded), loaded.run, out)


def torchrun(num_processes: int, module: str, *arguments: object) -> list[str]:
    """The command that starts a module on processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    return [*launcher, "-m", module, *map(str, arguments)]


def free_port() -> int:
    """A TCP port that is free now, below those that Linux gives to whoever asks for any (32768 and up)."""
    while True:
        with suppress(OSError), socket.create_server(("", SystemRandom().randrange(20000, 32768))) as free:
            return int(free.getsockname()[1])


def run(command: Sequence[str], rundir: RunDirectory) -> None:
    """A command to its end, its output in the run directory's log."""
    log = rundir.path / "log.txt"
    wait(start(command, log), log)


def output(command: Sequence[str], limit_s: float = 1500) -> str:
    """What a program of this checkout prints. Raises CalledProcessError where it fails, TimeoutExpired."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=True, timeout=limit_s, env=environment, stdout=subprocess.PIPE, text=True)
    return done.stdout


def wait(process: subprocess.Popen[bytes], log: Path, limit_s: float = RUN_LIMIT_S) -> None:
    """Wait for a clean end. Raises ``RunFailed`` otherwise."""
    try:
        processes.finish(process, limit_s)
    except EngineError as error:
        raise RunFailed(f"{error}:\n{_tail(log)}") from None


def train(rundir: RunDirectory, *words: str) -> None:
    """Run ``launch.sh`` to its end."""
    wait(processes.launch(rundir.path, *words), rundir.path / "log.txt")


def train_until_killed(rundir: RunDirectory, step: int, *words: str) -> int:
    """Run ``launch.sh`` and ``kill -9`` all of it once ``step`` is logged. Returns the last step logged."""
    try:
        return processes.kill_at(processes.launch(rundir.path, *words), rundir.path, step, RUN_LIMIT_S)
    except EngineError as error:
        raise RunFailed(f"{error}:\n{_tail(rundir.path / 'log.txt')}") from None


def wait_for_step(jobs: Sequence[subprocess.Popen[bytes]], run: Path, step: int, limit_s: float) -> None:
    """Until ``step`` is logged. Raises ``RunFailed`` where a job ends before, or nothing comes."""
    deadline = time.monotonic() + limit_s
    while not (rows := processes.metrics(run)) or rows[-1]["step"] < step:
        if time.monotonic() > deadline or any(job.poll() is not None for job in jobs):
            raise RunFailed(f"{run.name}: step {step} was not reached: {processes.tail(run)}")
        time.sleep(0.01)


def metrics(rundir: RunDirectory) -> list[dict[str, Any]]:
    """Rows of ``metrics.jsonl``; a last line cut short by a kill does not count."""
    return processes.metrics(rundir.path)


def _tail(log: Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
