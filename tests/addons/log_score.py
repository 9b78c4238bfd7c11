"""The doctor against log lines of public issues: how many causes it names first, and how often it names a wrong one.

    python -m tests.addons.log_score     (make prove NAME=doctor-corpus)

``log_corpus/train.yaml`` is what the patterns were written from; ``held_out.yaml`` and ``fresh.yaml`` are not, and
the doctor named 3 of the 14 in ``later.yaml`` before any pattern was written from them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.addons.written import read

CORPUS = Path(__file__).parent / "log_corpus"
PARTS = ("train", "held_out", "fresh", "later")
HEALTHY = "none"
Told = Sequence[tuple[str, str, str]]
"""(the cause that a thread explains, the one that the doctor names first, the thread) of excerpts."""


def told(part: str) -> Told:
    """Of one part of the corpus."""
    rows = yaml.safe_load((CORPUS / f"{part}.yaml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as directory:
        causes = [read(Path(directory), {"excerpt.log": row["text"].split("\n")}) for row in rows]
    return [(row["cause"], found[0].cause if found else HEALTHY, row["source"])
            for row, found in zip(rows, causes, strict=True)]  # fmt: skip


def measured(rows: Told) -> tuple[float, list[str]]:
    """The part of the failures whose cause is named first, and the healthy runs with an alarm."""
    failures = [cause == named for cause, named, _ in rows if cause != HEALTHY]
    return sum(failures) / len(failures), [source for cause, named, source in rows if cause == HEALTHY != named]


def main() -> int:
    """Prints a row a part; 1 where the doctor names fewer than the tests ask for, or alarms at a healthy run."""
    parts = {part: told(part) for part in PARTS}
    print(*(f"{cause:22} named {named:28} {source}\n" for rows in parts.values() for cause, named, source in rows
            if cause != named), sep="")  # fmt: skip
    print(f"{'part':10} {'excerpts':>8} {'recall':>7} {'false alarms':>12}")
    for part, rows in parts.items():
        print(f"{part:10} {len(rows):8} {measured(rows)[0]:7.3f} {len(measured(rows)[1]):12}")
    return int(any(recall < 0.9 or alarms for recall, alarms in map(measured, parts.values())))


if __name__ == "__main__":
    sys.exit(main())
