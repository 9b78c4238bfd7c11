"""Start a run directory the way a user does, wait for it, or kill all of it at a step."""

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

from kit.errors import EngineError

LIMIT_S = 900
"""Sixteen processes on two cores need minutes to start; a hang must end."""
LAST_LINES = 12


def start(rundir: Path, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """``launch.sh`` with these words, its output appended to ``log.txt``."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (rundir / "log.txt").open("ab") as stream:
        return subprocess.Popen(
            [str(rundir / "launch.sh"), *words], stdout=stream, stderr=stream, env=environment, start_new_session=True
        )


def run(rundir: Path, *words: str) -> None:
    """To its end. Raises ``EngineError`` with the end of its log."""
    process = start(rundir, words)
    try:
        code = process.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        kill(process)
        raise EngineError(f"{rundir.name}: no end within {LIMIT_S} s: {_tail(rundir)}") from None
    if code != 0:
        raise EngineError(f"{rundir.name}: exit code {code}: {_tail(rundir)}")


def run_until_killed(rundir: Path, step: int) -> int:
    """``kill -9`` of every process once ``step`` is logged. Returns the last step logged."""
    process = start(rundir, ())
    deadline = time.monotonic() + LIMIT_S
    while not (rows := metrics(rundir)) or rows[-1]["step"] < step:
        if process.poll() is not None:
            raise EngineError(
                f"{rundir.name}: ended (exit code {process.returncode}) before step {step}: {_tail(rundir)}"
            )
        if time.monotonic() > deadline:
            kill(process)
            raise EngineError(f"{rundir.name}: step {step} not reached within {LIMIT_S} s: {_tail(rundir)}")
        time.sleep(0.02)
    kill(process)
    return int(rows[-1]["step"])


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
    rows: list[dict[str, Any]] = []
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def _tail(rundir: Path) -> str:
    lines = (rundir / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line for line in lines if "rror" in line and "ChildFailed" not in line]
    return " | ".join((told or lines)[-LAST_LINES:])[:1500]
