"""docs/one-node-70b.md says what the planner says."""

from __future__ import annotations

from benchmarks.tables.one_node_70b import CHOICES, NODE, PAGE, outcomes, updated


def test_the_tables_are_the_planners() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert updated(page) == page, "run: python -m benchmarks.tables.one_node_70b"


def test_what_the_text_says_is_so() -> None:
    """The sentences around the tables."""
    found = {outcome.choice: outcome for outcome in outcomes()}
    without = [choice for choice in CHOICES if choice.optimizer == "none"]
    whole_weights = [
        choice for choice in CHOICES if choice.engine == "deepspeed" and choice.stage in (1, 2) and choice.tp is None
    ]
    assert not any(found[choice].fits for choice in (*without, *whole_weights))
    assert any(found[choice].fits for choice in CHOICES if choice.optimizer == "cpu")
    assert all(found[choice].fits for choice in CHOICES if choice.optimizer == "nvme")
    assert NODE.host_ram_gib is not None
    assert all(found[c].report.host_ram_gib_per_node < NODE.host_ram_gib for c in CHOICES if found[c].fits)  # type: ignore[union-attr]
