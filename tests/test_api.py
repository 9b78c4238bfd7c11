"""The Python interface: what the command line does, and the notebook that shows it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import kit
from kit import api
from kit.errors import EngineError
from tests.support.assets import RECIPE, ROOT, prepare

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
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    printed = capsys.readouterr().out
    assert [
        part for part in ("GiB", "MFU", "cluster=16xH200", "stage3_prefetch", "[unknown-key]") if part not in printed
    ] == []


@pytest.mark.nightly
def test_a_run_is_trained_and_converted(tmp_path: Path) -> None:
    assets = prepare()
    changes = [f"run.model_path={assets.model}", f"run.data={{train: {assets.train}}}", "run.steps=2"]
    run = kit.emit_run(kit.load_recipe(RECIPE, changes), tmp_path / "run")
    kit.train(run.path)
    step = run.path / "checkpoints" / "step-00000002"
    assert "float32" in kit.convert(step, tmp_path / "model", dtype="float32")
    assert (tmp_path / "model" / "config.json").is_file()
    with pytest.raises(EngineError, match="exit code"):
        kit.train(run.path)  # a run that is done is not begun again
