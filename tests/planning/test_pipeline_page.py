"""docs/pipeline-choice.md says what the planner says; what was run here is repeated by
benchmarks.tables.pipeline_choice."""

from __future__ import annotations

from benchmarks.tables.pipeline_choice.planned import PAGE, updated


def test_the_table_is_the_planners() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert updated(page) == page, "run: python -m benchmarks.tables.pipeline_choice"
