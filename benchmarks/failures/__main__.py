"""Provoke every failure, read the logs, and say whether the doctor found the cause.

    python -m benchmarks.failures [NAME…] [--keep DIRECTORY] [--markdown]

Each is a real job of two processes over gloo, started by torchrun, that fails in its own way (``worker.py``). Exit
code 1 where a cause was not found first, or on the wrong rank.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kit.diagnose.logs import Cause, diagnose

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
    Failure("mismatched", "rank 1 reduces another shape", "mismatched-collectives"),
    Failure("nan", "NaN in the weights of rank 1", "not-a-number", None),
    Failure("slow", "rank 1 sleeps half a second a step", "slow-rank"),
    Failure("data", "the data set ends", "data-exhausted", None),
    Failure("disk-full", "a checkpoint on a disk of 16 MiB", "disk-full"),
    Failure("out-of-memory", "rank 1 asks for 256 TiB", "host-out-of-memory"),
    Failure("longer-batch", "rank 1 gets a longer batch than the others", "host-out-of-memory", 1, "and no other"),
    Failure("missing-op", "rank 1 has no compiler for an operator", "missing-op"),
    Failure("dead-node", "the host of rank 1 goes, with its kernel's network", "dead-node", None),
)


def main() -> int:
    """0 where every cause was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of the failures; all by default")
    parser.add_argument("--keep", type=Path, help="leave the logs in this directory")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    chosen = [failure for failure in FAILURES if not arguments.names or failure.name in arguments.names]
    keep = arguments.keep or Path(tempfile.mkdtemp())
    keep.mkdir(parents=True, exist_ok=True)
    missed = 0
    if arguments.markdown:
        print("| provoked | found first | on rank | said |\n|---|---|---|---|")
    for failure in chosen:
        causes = provoke(failure, keep / failure.name)
        if causes is None:
            print(f"SKIPPED {failure.name}: only root can mount a small disk or make hosts")
            continue
        right = found(failure, causes)
        missed += not right
        first = causes[0] if causes else None
        if arguments.markdown and first:
            ranks = ", ".join(map(str, first.ranks)) or "–"
            print(f"| {failure.planted} | `{first.cause}` | {ranks} | {first.meaning} |")
        else:
            print(f"{'ok    ' if right else 'MISSED'} {failure.name}: {failure.planted}\n  {first or 'nothing found'}")
    if arguments.keep is None:
        shutil.rmtree(keep)
    return 1 if missed else 0


def provoke(failure: Failure, directory: Path) -> tuple[Cause, ...] | None:
    """Run the job and read its logs; None where this machine cannot provoke it."""
    directory.mkdir()
    if failure.name == "dead-node":
        done = subprocess.run([sys.executable, "-m", "benchmarks.failures.dead_node", str(directory)], timeout=LIMIT_S)
        return None if done.returncode == 3 else diagnose([directory / "job.log"])
    words = ["--nproc-per-node", "2", "--standalone", "-m", "benchmarks.failures.worker", failure.name]
    with small_disk(directory / "disk", failure.name == "disk-full") as disk:
        if disk is None:
            return None
        run = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words, str(disk)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "200"},
        )
    log = directory / "job.log"
    # Logs are kept with the tests, and where this checkout lies is nobody's business.
    log.write_text((run.stdout + run.stderr).replace(f"{Path.cwd()}/", ""), encoding="utf-8")
    return diagnose([log, *directory.rglob("flight_*")])


def found(failure: Failure, causes: tuple[Cause, ...]) -> bool:
    """Whether the first cause is the planted one, on the planted rank, in the right words."""
    if not causes or causes[0].cause != failure.cause or failure.says not in causes[0].meaning:
        return False
    return failure.rank is None or failure.rank in causes[0].ranks


@contextmanager
def small_disk(path: Path, wanted: bool) -> Iterator[Path | None]:
    """A file system of ``DISK_BYTES`` where one is wanted and can be mounted; else a plain directory, or None."""
    path.mkdir()
    if not wanted:
        yield path
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]).returncode == 0
    try:
        yield path if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(path)], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
