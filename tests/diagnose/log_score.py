"""The doctor against log lines of public issues: how many causes it names first, and how often it names a wrong one.

    python -m tests.diagnose.log_score     (make prove NAME=doctor-corpus)

``log_corpus/train.yaml`` is what the patterns were written from; ``held_out.yaml`` and ``fresh.yaml`` are not, and
the doctor named 3 of the 14 in ``later.yaml`` before any pattern was written from them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from kit.diagnose.logs.diagnosis import diagnose

CORPUS = Path(__file__).parent / "log_corpus"
PARTS = ("train", "held_out", "fresh", "later")
HEALTHY = "none"


@dataclass(frozen=True)
class Score:
    """Counts of one part of the corpus."""

    right: int
    failures: int
    alarms: int
    healthy: int
    wrong: tuple[str, ...]
    """A line for each excerpt that is not named as its thread explains it."""

    @property
    def recall(self) -> float:
        """Of the excerpts of failures, the part whose cause is named first."""
        return self.right / self.failures


def causes(text: str) -> Sequence[str]:
    """What the doctor says about an excerpt, the root cause first."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "excerpt.log"
        log.write_text(text + "\n", encoding="utf-8")
        return [cause.cause for cause in diagnose([log])]


def score(part: str) -> Score:
    """Of one part of the corpus."""
    right = alarms = healthy = 0
    wrong, rows = [], yaml.safe_load((CORPUS / f"{part}.yaml").read_text(encoding="utf-8"))
    for row in rows:
        named = causes(row["text"])
        if row["cause"] == HEALTHY:
            healthy += 1
            alarms += bool(named)
        else:
            right += named[:1] == [row["cause"]]
        if (named or [HEALTHY])[0] != row["cause"]:
            wrong.append(f"{row['cause']:22} named {', '.join(named) or 'nothing':28} {row['source']}")
    return Score(right, len(rows) - healthy, alarms, healthy, tuple(wrong))


def main() -> int:
    """Prints a row a part; 1 where the doctor names fewer than the tests ask for, or alarms at a healthy run."""
    scores = {part: score(part) for part in PARTS}
    for result in scores.values():
        print(*result.wrong, sep="\n")
    print(f"\n{'part':10} {'failures':>8} {'named first':>11} {'recall':>7} {'healthy':>8} {'false alarms':>12}")
    for part, each in scores.items():
        print(f"{part:10} {each.failures:8} {each.right:11} {each.recall:7.3f} {each.healthy:8} {each.alarms:12}")
    return int(any(each.alarms or each.recall < 0.9 for each in scores.values()))


if __name__ == "__main__":
    sys.exit(main())
