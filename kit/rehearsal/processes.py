"""Start a run directory the way a user does, wait for it, or kill all of it at a step."""

from __future__ import annotations

import contextlib
import os
import socket
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
"""Sixteen processes on two cores need minutes to start; a hang must end."""
LAST_LINES = 12


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in its own process group, its output appended to ``log``."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("ab") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)


def launch(rundir: Path, *words: str) -> subprocess.Popen[bytes]:
    """``launch.sh`` with these words, its output in ``log.txt``."""
    return start([str(rundir / "launch.sh"), *words], rundir / "log.txt")


def finish(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Wait for a clean end. Raises ``EngineError`` otherwise; after ``limit_s`` all of it is killed."""
    try:
        code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        kill(process)
        raise EngineError(f"no end within {limit_s:g} s") from None
    if code != 0:
        raise EngineError(f"exit code {code}")


def kill_at(process: subprocess.Popen[bytes], rundir: Path, step: int, limit_s: float) -> int:
    """``kill -9`` of every process once ``step`` is logged. Returns the last step logged. Raises ``EngineError`` where
    it ends before, or does not come so far in ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not (rows := metrics(rundir)) or rows[-1]["step"] < step:
        if process.poll() is not None:
            raise EngineError(f"ended by itself (exit code {process.returncode}) before step {step}")
        if time.monotonic() > deadline:
            kill(process)
            raise EngineError(f"step {step} not reached within {limit_s:g} s")
        time.sleep(0.02)
    kill(process)
    return int(rows[-1]["step"])


def run(rundir: Path, *words: str) -> None:
    """Runs it to its end. Raises ``EngineError`` with what its log says."""
    _finish(launch(rundir, *words), rundir)


@contextlib.contextmanager
def beside(rundir: Path) -> Iterator[None]:
    """Runs it while the body of the ``with`` does something else."""
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
    """Runs until ``step``, kills every process and returns the last step that was logged (``kill_at``). Raises
    ``EngineError`` with what the log says."""
    try:
        return kill_at(launch(rundir), rundir, step, LIMIT_S)
    except EngineError as error:
        raise EngineError(f"{rundir.name}: {error}: {tail(rundir)}") from None


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the launcher and every rank (torchrun gives each its own session)."""
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    process.wait()
    psutil.wait_procs(ranks)


def metrics(rundir: Path) -> list[dict[str, Any]]:
    """Rows of ``metrics.jsonl``; a last line cut short by a kill does not count."""
    file = rundir / "metrics.jsonl"
    return [row for _, row in logged_rows(file) if row is not None] if file.exists() else []


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def tail(rundir: Path) -> str:
    """The last errors in ``log.txt``, or its last lines where there is none."""
    lines = (rundir / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line for line in lines if "rror" in line and "ChildFailed" not in line]
    return " | ".join((told or lines)[-LAST_LINES:])[:1500]
