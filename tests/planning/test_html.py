"""``kit plan --html``: one page with everything, that loads nothing and lets no name become markup."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kit
from kit.cli import app
from kit.planner.request import Request
from kit.planner.search import search
from kit.report.html import page


class Elements(HTMLParser):
    """Every element with its attributes; and that each one that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_has_every_layout_and_bars_of_the_right_length() -> None:
    plan = kit.plan("llama-3.1-8b", "8xH100")
    elements = Elements(page(plan))
    assert elements.open == []
    considered = search(Request(model=plan.model, cluster=plan.cluster, job=plan.job)).considered
    near = [each for each in considered if (each.step_time_s or 1e9) <= 3 * plan.predicted.step_time_s]
    circles = [each for tag, each in elements.found if tag == "circle"]
    assert len(circles) == len(near) > 20
    assert len([each for each in circles if "stroke" in each]) == 1
    widths = [float((each["style"] or "").split("%")[0].split()[-1]) for tag, each in elements.found if "title" in each]
    assert sum(widths) == pytest.approx(100 * plan.predicted.peak_gib / plan.cluster.gpu.memory_gib + 100, abs=0.5)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in elements.found}
    assert not [each for _, each in elements.found if {"src", "href"} & each.keys()]


def test_a_name_is_no_markup() -> None:
    plan = kit.plan("llama-3.2-1b", "8xH100")
    hostile = dataclasses.replace(plan, model=dataclasses.replace(plan.model, name="<script>alert(1)</script>"))
    assert "<script" not in page(hostile)


def test_a_page_is_written_once(tmp_path: Path) -> None:
    words = ["plan", "llama-3.2-1b", "--gpus", "8xH100", "--html", str(tmp_path / "plan.html")]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert "<svg" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    again = CliRunner().invoke(app, words)
    assert "File exists" in str(again.exception)
