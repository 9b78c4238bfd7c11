"""A rehearsal can fail: one with faults planted in its scaled-down copy, each in the figure in which it must show."""

from __future__ import annotations

import re

import pytest

import kit
from kit.errors import RunDirectoryError
from kit.rehearsal.rehearse import rehearse
from kit.specs.shipped import recipe_path
from tests.support.refusals import refusal
from tests.system import rehearsals

NAME = "tiny-llama-pretrain-cpu-bf16"


@pytest.mark.nightly
def test_a_wrong_export_and_rounded_masters_turn_a_rehearsal_red() -> None:
    """On one process. Others, and the other engines: ``python -m tests.system.rehearsals --plant-all``."""
    record = rehearsals.rehearsed(NAME, ["transposed-query", "rounded-masters"])
    assert rehearsals.caught(["transposed-query", "rounded-masters"], record, NAME) == [True, True]
    assert record["loss_difference"] < 1e-6, "trained right, only exported wrong"
    others = rehearsals.caught(["double-gradients", "double-learning-rate"], record, NAME)
    assert others == [False] * 3, "those were not planted"


def test_a_rehearsal_says_what_its_engine_lacks_before_it_starts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kit.preflight.run_checks._is_installed", lambda name: name != "deepspeed")
    recipe = kit.load_recipe(recipe_path("tiny-llama-pretrain-zero3-2xcpu"))
    assert re.search(
        r"needs deepspeed, not installed .*megatron-kit\[deepspeed\]",
        refusal(RunDirectoryError, rehearse, "a", kit.plan(recipe), recipe.run, tmp_path / "a"),
    )
    assert not list(tmp_path.rglob("log.txt"))
