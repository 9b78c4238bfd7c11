"""``kit plan --html``: one page with everything, that loads nothing and lets no name become markup."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kit
from kit.cli import app
from kit.planner.request import Request
from kit.planner.search import search
from kit.report.html import _round_numbers, page
from kit.report.view import view_of


@pytest.mark.slow
def test_a_page_has_every_layout_that_is_near_and_loads_nothing(tmp_path: Path) -> None:
    plan = kit.plan("llama-3.2-1b", "8xH100")
    considered = search(Request(model=plan.model, cluster=plan.cluster, job=plan.job)).considered
    near = [each for each in considered if (each.step_time_s or 1e9) <= 3 * plan.predicted.step_time_s]
    words = ["plan", "llama-3.2-1b", "--gpus", "8xH100", "--html", str(tmp_path / "plan.html")]
    assert CliRunner().invoke(app, words).exit_code == 0
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert text.count("<circle") == len(near) > 20
    assert text.count('stroke-width="3"') == 1
    assert not re.search(r"<(script|link|img|iframe)\b|\b(src|href)\s*=|url\(", text)
    assert "File exists" in str(CliRunner().invoke(app, words).exception)
    hostile = dataclasses.replace(plan, model=dataclasses.replace(plan.model, name="<script>alert(1)</script>"))
    assert not re.search("<script", page(view_of(hostile)))


@pytest.mark.parametrize(
    ("end", "numbers"),
    [
        (75.1, [0, 20, 40, 60]),
        (6.0, [0, 1, 2, 3, 4, 5, 6]),
        (6.1, [0, 2, 4, 6]),
        (0.27, [0, 0.05, 0.1, 0.15, 0.2, 0.25]),
        (52_000, [0, 10_000, 20_000, 30_000, 40_000, 50_000]),
    ],
)
def test_axes_have_round_numbers(end, numbers):
    assert _round_numbers(end) == numbers
