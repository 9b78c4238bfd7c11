"""The cost model against the tensors in the engine, for a few configurations; benchmarks.accuracy.deepspeed_bytes has
all."""

from __future__ import annotations

import pytest

from benchmarks.accuracy.deepspeed_bytes.cases import WORLD_SIZE, Case
from benchmarks.accuracy.deepspeed_bytes.compare import page, terms
from tests.support.workers import pool

FEW = [
    Case("bf16", 1, 2),
    Case("bf16", 2, 2, optimizer="cpu"),
    Case("bf16", 3, 2, optimizer="cpu", param="cpu"),
    Case("fp32", 3, 1, hpz=2),
    Case("bf16", 2, 2, autocast=True),
    Case("bf16", 2, 2, short_state=True),
    Case("bf16", 3, 1, short_state=True),
]


@pytest.mark.everyday("bf16, ZeRO-3, 2 micro batches, optimizer cpu, weights cpu")
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_cost_model_and_engine_agree(case, tmp_path):
    measured = pool("deepspeed", WORLD_SIZE).run(measure, case, tmp_path)[0]
    assert [term for term in terms(case, measured) if not term.agrees] == []


def measure(case, directory):
    from benchmarks.accuracy.deepspeed_bytes.worker import measure

    return measure(case, directory)


def test_a_tensor_that_nobody_counts_would_show(tmp_path):
    """A megabyte kept from the build on: the terms stay, and `other` differs."""
    measured = pool("deepspeed", WORLD_SIZE).run(measure_with_a_leak, FEW[0], tmp_path)[0]
    found = terms(FEW[0], measured)
    assert {term.name for term in found if not term.agrees} == {"other, before the step", "other, after it"}
    assert "2 of them off" in page(found)
    assert "**differs**" in page(found)


def measure_with_a_leak(case, directory):
    import torch

    from benchmarks.accuracy.deepspeed_bytes import worker
    from kit.engines.deepspeed.engine import DeepSpeedEngine

    class Leaking(DeepSpeedEngine):
        def __init__(self, rundir):
            super().__init__(rundir)
            self.leak = torch.zeros(2**20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "DeepSpeedEngine", Leaking)
        return worker.measure(case, directory)
