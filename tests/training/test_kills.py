"""A few of ``tests.system.kills``: real kills of real processes, and a planted fault that the comparison
must find."""

from __future__ import annotations

import random

import pytest

from tests.system.kills.__main__ import torment
from tests.system.kills.cases import BY_NAME


@pytest.mark.everyday("a thread writes")
@pytest.mark.parametrize(
    ("case", "plant"), [("torch-fsdp2-async", False), ("torch-ddp", True)], ids=["a thread writes", "plant"]
)
def test_killed_twice_it_comes_to_the_same(tmp_path, kills_data, case, plant):
    outcome = torment(BY_NAME[case], tmp_path / "case", kills_data, 2, 16, random.Random(3), plant)
    assert len(outcome.phases) == 2
    if plant:
        assert outcome.differs.startswith("step "), "a sample was left out and nobody saw it"
    else:
        assert outcome.differs == ""
