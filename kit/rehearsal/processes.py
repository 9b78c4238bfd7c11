"""Starts a run directory with launch.sh, waits for its end, or kills all its processes at a step."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from kit.errors import EngineError
from kit.training.logging.metrics import logged_rows

LIMIT_S = 900
"""Time limit of a run, which ends a hang. Sixteen processes on two cores need minutes to start."""
LAST_LINES = 12


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a new session; append its output to ``log``."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("ab") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)


def launch(rundir: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start ``launch.sh`` with the arguments ``words``; append its output to ``log.txt``."""
    return start([str(rundir / "launch.sh"), *words], rundir / "log.txt")


def finish(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Wait for exit code 0. Raises ``EngineError`` for another code, and after ``limit_s`` seconds, when it kills all
    processes; so does Ctrl-C, which does not reach their session."""
    try:
        code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        kill(process)
        raise EngineError(f"no end within {limit_s:g} s") from None
    except KeyboardInterrupt:
        kill(process)
        raise
    if code != 0:
        raise EngineError(f"exit code {code}")


def kill_at(process: subprocess.Popen[bytes], rundir: Path, step: int, limit_s: float) -> int:
    """Send SIGKILL to every process when ``step`` is logged. Returns the last logged step. Raises ``EngineError`` if
    the run ends before, or does not reach the step within ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    try:
        while not (rows := metrics(rundir)) or rows[-1]["step"] < step:
            if process.poll() is not None:
                raise EngineError(f"ended by itself (exit code {process.returncode}) before step {step}")
            if time.monotonic() > deadline:
                raise EngineError(f"step {step} not reached within {limit_s:g} s")
            time.sleep(0.02)
    finally:  # also at Ctrl-C
        if process.poll() is None:
            kill(process)
    return int(rows[-1]["step"])


def run(rundir: Path, *words: str) -> None:
    """Run ``launch.sh`` to its end. Raises ``EngineError`` with the errors in its log."""
    _finish(launch(rundir, *words), rundir)


@contextlib.contextmanager
def beside(rundir: Path) -> Iterator[None]:
    """Run ``launch.sh`` in parallel with the body of the ``with``, and wait for its end."""
    process = launch(rundir)
    try:
        yield
        _finish(process, rundir)
    finally:
        if process.poll() is None:
            kill(process)


def _finish(process: subprocess.Popen[bytes], rundir: Path) -> None:
    try:
        finish(process, LIMIT_S)
    except EngineError as error:
        raise EngineError(f"{rundir.name}: {error}: {tail(rundir)}") from None


def run_until_killed(rundir: Path, step: int) -> int:
    """Run until ``step`` is logged, then kill every process. Returns the last logged step. Raises ``EngineError`` with
    the errors in the log."""
    try:
        return kill_at(launch(rundir), rundir, step, LIMIT_S)
    except EngineError as error:
        raise EngineError(f"{rundir.name}: {error}: {tail(rundir)}") from None


def kill(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to the launcher and every rank, and wait until all have ended. torchrun starts each rank in its own
    session. A rank that has ended stays a zombie until the machine's first process asks for it: in a container it may
    ask late, or never."""
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    process.wait()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            while rank.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)


def metrics(rundir: Path) -> list[dict[str, Any]]:
    """Rows of ``metrics.jsonl``, without an incomplete last line after a kill."""
    file = rundir / "metrics.jsonl"
    return [row for _, row in logged_rows(file) if row is not None] if file.exists() else []


def tail(rundir: Path) -> str:
    """The last errors in ``log.txt``, or its last lines if it has no errors."""
    lines = (rundir / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line for line in lines if "rror" in line and "ChildFailed" not in line]
    return " | ".join((told or lines)[-LAST_LINES:])[:1500]
