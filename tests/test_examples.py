"""Scripts that know nothing of kit under the files that it writes. All of them: ``python -m
benchmarks.system_tests.examples``."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.system_tests.examples.__main__ import compared
from benchmarks.system_tests.examples.cases import ExampleError, launched, plain_torch
from benchmarks.system_tests.examples.inputs import prepare


@pytest.mark.rotated("launched")
def test_an_accelerator_script_becomes_zero_3_on_two_processes() -> None:
    directory = prepare()
    reference = plain_torch(directory)
    found = launched("accelerate_loop", "ZeRO-3", directory)
    assert (found.engine, found.zero_stage, found.processes) == ("DeepSpeedEngine", 3, 2)
    compared(found, reference, "ZeRO-3")
    doubled = dataclasses.replace(found, norms=tuple(2 * norm for norm in found.norms))
    with pytest.raises(ExampleError):
        compared(doubled, reference, "doubled gradients")
