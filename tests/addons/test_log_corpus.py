"""The doctor on log lines of public issues, a part of which nobody looked at to write its patterns: how many causes it
names first, and how often it names a wrong one.

``make prove NAME=doctor-corpus`` prints a row a part, behind what was named otherwise.

``log_corpus/train.yaml`` is what the patterns were written from; ``held_out.yaml`` and ``fresh.yaml`` are not, and
the doctor named 3 of the 14 in ``later.yaml`` before any pattern was written from them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.addons.test_lint_corpus import SECRET
from tests.addons.written import read

CORPUS = Path(__file__).parent / "log_corpus"
HEALTHY = "none"
LEAST = {"train": 0.98, "held_out": 0.95, "fresh": 0.9, "later": 0.92}
"""Part of the corpus → the least part of its failures whose cause is named first."""


def rows_of(part: str) -> list[dict[str, str]]:
    """Excerpts, each with the cause that its thread explains."""
    rows: list[dict[str, str]] = yaml.safe_load((CORPUS / f"{part}.yaml").read_text(encoding="utf-8"))
    return rows


@pytest.mark.parametrize("part", LEAST)
def test_recall_and_false_alarms(part: str, tmp_path: Path) -> None:
    """Of the failures, and of the healthy runs."""
    rows = rows_of(part)
    causes = [read(tmp_path, {"excerpt.log": row["text"].split("\n")}) for row in rows]
    named = [(row, found[0].cause if found else HEALTHY) for row, found in zip(rows, causes, strict=True)]
    wrong = [f"{row['cause']} named {cause} {row['source']}" for row, cause in named if row["cause"] != cause]
    right = [row["cause"] == cause for row, cause in named if row["cause"] != HEALTHY]
    alarms = [row["source"] for row, cause in named if row["cause"] == HEALTHY != cause]
    said = f"{part}: {len(named)} excerpts, recall {sum(right) / len(right):.3f}, {len(alarms)} false alarms"
    print("", *wrong, said, sep="\n")
    assert sum(right) >= LEAST[part] * len(right), wrong
    assert alarms == []


def test_every_excerpt_has_a_source_and_is_in_one_part() -> None:
    rows = [row for part in LEAST for row in rows_of(part)]
    assert len({(row["source"], row["text"]) for row in rows}) == len(rows) > 200
    thread = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+")
    assert [row for row in rows if not thread.fullmatch(row["source"]) or SECRET.search(row["text"])] == []
