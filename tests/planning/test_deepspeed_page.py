"""docs/deepspeed.md says what the planner says."""

from __future__ import annotations

from benchmarks.tables import slow_links
from benchmarks.tables.deepspeed_stages import PAGE, updated


def test_the_tables_are_the_planners() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert updated(page) == page, "run: python -m benchmarks.tables.deepspeed_stages"


def test_a_changed_number_would_be_noticed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    wrong = page.replace("| 3 | ", "| 3 | 1", 1)
    assert wrong != page
    assert updated(wrong) == page


def test_the_gains_on_slow_links_are_the_cost_models() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert slow_links.updated(page) == page, "run: python -m benchmarks.tables.slow_links"
    assert page.count("llama-3.1-8b, ZeRO-3, hpZ 8, qwZ, qgZ |") == 1
