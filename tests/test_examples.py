"""Scripts that know nothing of kit under the files that it writes. All of them: ``python -m benchmarks.examples``."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.examples.__main__ import compared
from benchmarks.examples.cases import ExampleError, launched
from benchmarks.examples.inputs import prepare
from benchmarks.examples.plain import plain_torch


def test_an_accelerator_script_becomes_zero_3_on_two_processes() -> None:
    directory = prepare()
    reference = plain_torch(directory)
    found = launched("accelerate_loop", "ZeRO-3", directory)
    assert (found.engine, found.zero_stage, found.processes) == ("DeepSpeedEngine", 3, 2)
    compared(found, reference, "ZeRO-3")
    doubled = dataclasses.replace(found, norms=tuple(2 * norm for norm in found.norms))
    with pytest.raises(ExampleError):
        compared(doubled, reference, "doubled gradients")
