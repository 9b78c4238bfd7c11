"""The Python interface: what the command line does, and the notebook that shows it."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

import kit
from kit import api
from tests.support import ROOT

FUNCTIONS = (
    "compare", "compare_clusters", "convert", "convert_data", "emit_run", "explain", "memory", "plan",
    "rehearse", "train",
)  # fmt: skip


def test_every_function_is_typed_and_says_what_it_raises() -> None:
    assert [name for name in (*api.__all__, *FUNCTIONS) if not hasattr(kit, name)] == []
    for name in FUNCTIONS:
        signature = inspect.signature(getattr(kit, name))
        hints = [signature.return_annotation, *(each.annotation for each in signature.parameters.values())]
        assert inspect.Signature.empty not in hints, name
        assert "Raises ``" in (getattr(kit, name).__doc__ or ""), name


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Cell by cell, as a kernel would, and what it prints is there."""
    cells = json.loads((ROOT / "examples" / "first_plan.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in (each for each in cells if each["cell_type"] == "code"):
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    printed = capsys.readouterr().out
    assert [
        part for part in ("GiB", "MFU", "cluster=16xH200", "stage3_prefetch", "[unknown-key]") if part not in printed
    ] == []
