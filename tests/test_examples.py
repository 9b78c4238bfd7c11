"""Scripts that know nothing of kit under the files that it writes. All of them: ``python -m
tests.system.examples``."""

from __future__ import annotations

import dataclasses

import pytest

from tests.system.examples.__main__ import compared
from tests.system.examples.cases import ExampleError, launched, plain_torch
from tests.system.examples.inputs import prepare


@pytest.mark.nightly
def test_an_accelerator_script_becomes_zero_3_on_two_processes() -> None:
    directory = prepare()
    reference = plain_torch(directory)
    found = launched("accelerate_loop", "ZeRO-3", directory)
    assert (found.engine, found.zero_stage, found.processes) == ("DeepSpeedEngine", 3, 2)
    compared(found, reference, "ZeRO-3")
    doubled = dataclasses.replace(found, norms=tuple(2 * norm for norm in found.norms))
    with pytest.raises(ExampleError):
        compared(doubled, reference, "doubled gradients")
