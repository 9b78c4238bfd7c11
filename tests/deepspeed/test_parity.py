"""DeepSpeed against plain torch: gradients of every parameter, losses and norms, on 2 processes."""

from __future__ import annotations

import pytest

from tests.deepspeed import cases
from tests.workers import pool

STEPS = 10
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return cases.hf_directory(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def reference(start):
    return cases.reference(start, STEPS)


def run(chosen, start, directory, steps=STEPS, fault=None):
    return pool("deepspeed", cases.WORLD_SIZE).run(cases.train, chosen, start, directory, steps, fault)[0]


def check(curve, reference, tolerance=TOLERANCE):
    assert cases.gradient_error(curve, reference) < tolerance
    assert cases.curve_error(curve.losses, reference.losses) < tolerance
    assert cases.curve_error(curve.norms, reference.norms) < tolerance


LAYOUTS = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, one micro batch": {"stage": 3, "micro_batch_size": 4, "gradient_accumulation_steps": 1},
    "stage 2, four micro batches": {"stage": 2, "micro_batch_size": 1, "gradient_accumulation_steps": 4},
    "stage 1, optimizer on the host": {"stage": 1, "offload_optimizer": "cpu"},
    "stage 2, optimizer on the host": {"stage": 2, "offload_optimizer": "cpu"},
    "stage 3, optimizer on the host": {"stage": 3, "offload_optimizer": "cpu"},
    "stage 3, all on the host": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "stage 2, recompute": {"stage": 2, "recompute": "full"},
    "stage 3, recompute": {"stage": 3, "recompute": "full"},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_fp32_is_plain_torch(layout, start, reference, tmp_path):
    check(run(cases.plan(**layout), start, tmp_path), reference)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_tied_embeddings(stage, tmp_path):
    start = cases.hf_directory(tmp_path, tied=True)
    curve = run(cases.plan(stage, tied=True), start, tmp_path, steps=3)
    check(curve, cases.reference(start, 3))
    assert "lm_head.weight" not in curve.gradients
