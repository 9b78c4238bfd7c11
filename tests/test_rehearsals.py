"""A rehearsal can fail: one with faults planted in its scaled-down copy, each in the figure in which it must show."""

from __future__ import annotations

import pytest

from benchmarks.system_tests import rehearsals

NAME = "tiny-llama-pretrain-cpu-bf16"


@pytest.mark.rotated("launched")
def test_a_wrong_export_and_rounded_masters_turn_a_rehearsal_red() -> None:
    """On one process. Others, and the other engines: ``python -m benchmarks.system_tests.rehearsals --plant-all``."""
    record = rehearsals.rehearsed(NAME, ["transposed-query", "rounded-masters"])
    assert rehearsals.caught(["transposed-query", "rounded-masters"], record, NAME) == [True, True]
    assert record["loss_difference"] < 1e-6, "trained right, only exported wrong"
    others = rehearsals.caught(["double-gradients", "double-learning-rate"], record, NAME)
    assert others == [False] * 3, "those were not planted"
