"""Start a run the way a user does, wait for it, and kill it where the demo says so."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

import kit
from kit.emit.run_directory import RunDirectory, write

RUN_LIMIT_S = 300
"""No run of these takes a minute on an idle machine; a hang must not last longer than this."""


class RunFailed(Exception):
    """A run ended with another exit code than expected; carries the end of its log."""


def emit(recipe: Path, out: Path, overrides: Sequence[str]) -> RunDirectory:
    """Recipe → plan → run directory."""
    loaded = kit.load_recipe(recipe, overrides)
    assert loaded.run is not None
    return write(kit.plan(loaded), loaded.run, out)


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in its own process group, its output in ``log``."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("ab") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)


def wait(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a clean end. Raises ``RunFailed`` otherwise."""
    try:
        code = process.wait(timeout=RUN_LIMIT_S)
    except subprocess.TimeoutExpired:
        kill(process)
        raise RunFailed(f"no end within {RUN_LIMIT_S} s:\n{_tail(log)}") from None
    if code != 0:
        raise RunFailed(f"exit code {code}:\n{_tail(log)}")


def train(rundir: RunDirectory, *words: str) -> None:
    """Run ``launch.sh`` to its end."""
    log = rundir.path / "log.txt"
    wait(start([str(rundir.path / "launch.sh"), *words], log), log)


def train_until_killed(rundir: RunDirectory, step: int, *words: str) -> int:
    """Run ``launch.sh`` and ``kill -9`` all of it once ``step`` is logged. Returns the last step logged."""
    log = rundir.path / "log.txt"
    process = start([str(rundir.path / "launch.sh"), *words], log)
    deadline = time.monotonic() + RUN_LIMIT_S
    while not (steps := [row["step"] for row in metrics(rundir)]) or steps[-1] < step:
        if process.poll() is not None:
            raise RunFailed(f"ended by itself (exit code {process.returncode}) before step {step}:\n{_tail(log)}")
        if time.monotonic() > deadline:
            kill(process)
            raise RunFailed(f"step {step} not reached within {RUN_LIMIT_S} s:\n{_tail(log)}")
        time.sleep(0.02)
    kill(process)
    return int(steps[-1])


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the launcher and every rank (torchrun gives each its own session); nobody gets to clean up."""
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    process.wait()
    psutil.wait_procs(ranks)


def metrics(rundir: RunDirectory) -> list[dict[str, Any]]:
    """Rows of ``metrics.jsonl``; a last line cut short by a kill does not count."""
    file = rundir.path / "metrics.jsonl"
    if not file.exists():
        return []
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _tail(log: Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
