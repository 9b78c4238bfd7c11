"""A script that knows nothing of kit, under the files of a run directory; the others run by ``make examples``."""

from __future__ import annotations

from pathlib import Path

from benchmarks.examples.__main__ import compared
from benchmarks.examples.cases import alone, launched
from benchmarks.examples.inputs import prepare


def test_an_accelerator_script_becomes_deepspeed_and_learns_the_same(tmp_path: Path) -> None:
    """Two processes, ZeRO-3, by ``accelerate launch``; engine, stage and processes are checked by ``launched``."""
    directory = prepare(tmp_path / "examples")
    error = compared(launched("accelerate_loop", "ZeRO-3", directory), alone("accelerate_loop", directory), "ZeRO-3")
    assert error < 1e-5
