"""Tables of docs that the planner makes say what the planner says."""

from __future__ import annotations

import pytest

from benchmarks.tables.__main__ import SECTIONS
from benchmarks.tables.one_node_70b import CHOICES, NODE, fitting, outcomes
from tests.support.page import ROOT, Section


@pytest.mark.everyday("pipeline depths")
@pytest.mark.parametrize("section", SECTIONS, ids=[section.name for section in SECTIONS])
def test_a_table_is_the_planners(section: Section) -> None:
    page = (ROOT / section.page).read_text(encoding="utf-8")
    assert section.updated(page) == page, "run: python -m benchmarks.tables"


def test_what_the_text_about_one_node_says_is_so() -> None:
    """The sentences around the tables."""
    fits = fitting(outcomes())
    without = [name for name, pins in CHOICES.items() if pins.offload_optimizer == "none"]
    whole_weights = [
        name
        for name, pins in CHOICES.items()
        if pins.engine == "deepspeed" and pins.zero_stage in (1, 2) and pins.tp is None
    ]
    assert not fits.keys() & {*without, *whole_weights}
    assert any(pins.offload_optimizer == "cpu" for name, pins in CHOICES.items() if name in fits)
    assert all(name in fits for name, pins in CHOICES.items() if pins.offload_optimizer == "nvme")
    assert NODE.host_ram_gib is not None
    assert all(report.host_ram_gib_per_node < NODE.host_ram_gib for report in fits.values())
