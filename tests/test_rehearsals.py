"""A rehearsal can fail: one with a fault planted in its twin, in the figure in which it must show."""

from __future__ import annotations

from benchmarks import rehearsals


def test_a_wrong_export_turns_a_rehearsal_red() -> None:
    """On one process. Others, and the other engines: ``python -m benchmarks.rehearsals --plant-all``."""
    record = rehearsals.rehearsed("tiny-llama-pretrain-cpu", "transposed-query")
    assert rehearsals.caught("transposed-query", record, "tiny-llama-pretrain-cpu")
    assert record["loss_difference"] < 1e-6, "trained right, only exported wrong"
    assert not rehearsals.caught("double-gradients", record, "tiny-llama-pretrain-cpu"), "that one was not planted"
