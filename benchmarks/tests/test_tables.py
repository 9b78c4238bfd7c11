"""Tables of docs that the planner makes say what the planner says."""

from __future__ import annotations

import pytest

from benchmarks.tables.__main__ import SECTIONS
from tests.support import ROOT
from tests.support.page import Section


@pytest.mark.everyday("pipeline depths")
@pytest.mark.parametrize("section", SECTIONS, ids=[section.name for section in SECTIONS])
def test_a_table_is_the_planners(section: Section) -> None:
    page = (ROOT / section.page).read_text(encoding="utf-8")
    assert section.updated(page) == page, "run: python -m benchmarks.tables"
