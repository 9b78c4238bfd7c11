"""The doctor on log lines of public issues, a part of which nobody looked at to write its patterns."""

from __future__ import annotations

import re

import pytest
import yaml

from kit.addons.doctor.logs.patterns import PATTERNS
from tests.addons.log_score import CORPUS, HEALTHY, PARTS, measured, told
from tests.addons.test_lint_corpus import SECRET

LEAST = {"train": 0.98, "held_out": 0.95, "fresh": 0.9, "later": 0.92}


@pytest.mark.parametrize("part", PARTS)
def test_recall_and_false_alarms(part: str) -> None:
    rows = told(part)
    recall, alarms = measured(rows)
    assert recall >= LEAST[part], [row for row in rows if row[0] != row[1]]
    assert alarms == []


def test_every_excerpt_has_a_source_and_is_in_one_part() -> None:
    rows = [row for part in PARTS for row in yaml.safe_load((CORPUS / f"{part}.yaml").read_text())]
    assert len(rows) > 200
    assert len({(row["source"], row["text"]) for row in rows}) == len(rows)
    for row in rows:
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+", row["source"]), row
        assert not SECRET.search(row["text"]), row
        assert len(row["text"]) < 1000, row


def test_every_pattern_of_an_issue_is_in_the_corpus() -> None:
    named = {row["cause"] for part in PARTS for row in yaml.safe_load((CORPUS / f"{part}.yaml").read_text())}
    missing = {pattern.cause for pattern in PATTERNS if pattern.source} - named
    assert not missing
    assert HEALTHY in named
