"""Provoke every failure, read the logs, and say whether the doctor found the cause.

    python -m tests.system.failures [NAME…] [--keep DIRECTORY]

Each is a real job of two processes over gloo, started by torchrun, that fails in its own way (``worker.py``). Exit
code 1 where a cause was not provoked or not found first, or on another rank, in another phase or at another step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kit.addons.doctor.logs import Cause, diagnose
from tests.support.files import file_with
from tests.support.page import row, table
from tests.support.program import Names, chosen, run
from tests.support.runs import torchrun
from tests.support.small_disk import small_disk

LIMIT_S = 120
DISK_BYTES = 16 << 20


@dataclass(frozen=True)
class Failure:
    """What is done to a job and what must be said of it."""

    name: str
    planted: str
    cause: str
    rank: int | None = 1
    says: str = ""
    """Words that the meaning must hold."""
    phase: str | None = None
    """What the rank was doing, where that is told."""
    step: int | None = None
    """The first step that shows it, where that is told."""


FAILURES = (
    Failure("killed", "kill -9 of rank 1", "killed"),
    Failure(
        "skipped",
        "rank 1 stays away from a collective",
        "collective-timeout",
        0,
        "rank 1 did not come to all_reduce number 5",
    ),
    Failure("downloads", "rank 1 downloads while rank 0 waits", "collective-timeout", 0, "while rank 1 downloaded"),
    Failure(
        "each-other",
        "two pipeline stages that both receive first",
        "collective-timeout",
        0,
        "for each other: rank 0 in recv at tests/system/failures/worker.py",
    ),
    Failure("mismatched", "rank 1 reduces another shape", "mismatched-collectives"),
    Failure("disk-full", "a checkpoint on a disk of 16 MiB", "disk-full"),
    Failure("longer-batch", "a longer batch on rank 1", "host-out-of-memory", 1, "and no other", "forward"),
    Failure("backward", "rank 1's gradients do not fit", "host-out-of-memory", phase="backward"),
    Failure("optimizer", "rank 1's moments do not fit", "host-out-of-memory", phase="optimizer step"),
    Failure("building", "rank 1's model does not fit", "host-out-of-memory", phase="building the model"),
    Failure(
        "saving", "rank 1's copy of the model for a checkpoint does not fit", "host-out-of-memory", phase="checkpoint"
    ),
    Failure("missing-op", "rank 1 has no compiler for an operator", "missing-op"),
)


def main(
    names: Names, keep: Annotated[Path | None, typer.Option(help="leave the logs in this new directory")] = None
) -> int:
    """0 where every cause was found."""
    some, begin, missed = chosen(names, FAILURES), time.monotonic(), 0
    print(table(("provoked", "found first", "on rank", "said"), []), flush=True)
    with tempfile.TemporaryDirectory(prefix="kit-failures-") as scratch:
        logs = keep or Path(scratch) / "logs"
        logs.mkdir(parents=True)
        for failure in some:
            try:
                causes = provoke(failure, logs / failure.name)
            except (OSError, subprocess.TimeoutExpired) as error:
                print(f"NOT PROVOKED {failure.name}: {error}", flush=True)
                missed += 1
                continue
            for first in causes[:1]:
                where = ", ".join([*map(str, first.ranks), *filter(None, (first.phase, first.when))]) or "–"
                print(row((failure.planted, f"`{first.cause}`", where, first.meaning)), flush=True)
            if not found(failure, causes):
                missed += 1
                print(f"MISSED {failure.name}: {failure.planted}\n  {[*causes[:1]]}", flush=True)
    print(f"{len(some)} failures provoked, {missed} missed, {time.monotonic() - begin:.0f} s")
    return 1 if missed else 0


def provoke(failure: Failure, directory: Path) -> tuple[Cause, ...]:
    """Run the job and read its logs. Raises OSError where this machine has no small disk for it: only root may."""
    directory.mkdir()
    log = file_with(directory / "job.log", _without_places(_job(failure.name, directory), directory))
    return diagnose([log, *directory.rglob("flight_*")])


def found(failure: Failure, causes: tuple[Cause, ...]) -> bool:
    """Whether the first cause is the planted one, on the planted rank, in the right words, phase and step."""
    return any(
        (first.cause, failure.says in first.meaning) == (failure.cause, True)
        and failure.phase in (None, first.phase)
        and failure.step in (None, first.step)
        and (failure.rank is None or failure.rank in first.ranks)
        for first in causes[:1]
    )


def _without_places(text: str, directory: Path) -> str:
    """Logs are kept with the tests, and where this checkout and its interpreter lie is nobody's business."""
    places = {
        f"{Path.cwd()}/": "", str(directory): "DIRECTORY", str(Path(sys.prefix).resolve()): ".venv",
        sys.prefix: ".venv", sys.base_prefix: "PYTHON",
    }  # fmt: skip
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, places[place])
    return text


def _job(name: str, directory: Path) -> str:
    """What two processes print that fail in this way."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "200"}
    disk = directory / "disk"
    with small_disk(disk, DISK_BYTES) if name == "disk-full" else nullcontext(disk.mkdir()):
        words = torchrun(2, "tests.system.failures.worker", name, disk)
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, env=environment, check=False
        )
    return done.stdout + done.stderr


if __name__ == "__main__":
    run(main)
