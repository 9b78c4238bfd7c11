"""Each tier holds its limits by the recorded durations (``make durations``, on an idle machine with two cores)."""

from __future__ import annotations

import json

import pytest

from tests.conftest import DURATIONS, LIMITS_S
from tests.support import ROOT

KEPT = json.loads(DURATIONS.read_text(encoding="utf-8"))
CORES = 2
TIER_S = {"fast": 60, "test": 360}
"""Of ``make test-fast`` and of ``make test``, which runs both tiers; a tenth of it goes to start and imports."""


@pytest.mark.parametrize("tier", LIMITS_S)
def test_no_test_is_over_its_tiers_limit(tier: str) -> None:
    over = {name: took for name, took in KEPT[tier]["tests"].items() if took > LIMITS_S[tier]}
    assert not over, f"more than {LIMITS_S[tier]} s: make it shorter, or mark it slow (of fast ones) or nightly"


def test_a_tier_is_within_its_time() -> None:
    took = {tier: KEPT[tier]["seconds"] for tier in TIER_S}
    assert took["fast"] <= 0.9 * CORES * TIER_S["fast"]
    assert took["fast"] + took["test"] <= 0.9 * CORES * TIER_S["test"]


def test_what_is_recorded_is_there() -> None:
    """A file that went takes its durations with it."""
    named = {name.partition("::")[0] for tier in KEPT.values() for name in tier["tests"]}
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
