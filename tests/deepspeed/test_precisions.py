"""fp16 with loss scaling, and autocast over fp32 weights.

DeepSpeed refuses fp16 on CPU processes because they are slow at it, not because they could not: here its accelerator is
told to say yes, and everything else is DeepSpeed's own.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from kit.emit.deepspeed import ds_config
from kit.engines.base import StateKind
from tests.deepspeed import cases
from tests.workers import pool


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return cases.hf_directory(tmp_path_factory.mktemp("precisions"))


def fp16_allowed():
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True


def train_fp16(chosen, start, directory, settings):
    """Losses, norms, which steps were skipped, the scale after each, and gradients of the first."""
    fp16_allowed()
    engine = cases.build(chosen, start, directory, settings)
    rows, gradients = [], {}
    for step in range(6):
        loss = engine.forward_backward(cases.micro_batches(engine, chosen, step)).mean
        if step == 0:
            gradients = cases.exported(engine, StateKind.GRADIENT)
        before = engine.optimizer_steps
        norms = engine.apply(cases.learning_rate(step))
        rows.append((loss, norms, engine.optimizer_steps - before))
    engine.close()
    return rows, gradients


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_trains_like_fp32(stage, start, tmp_path):
    chosen = cases.plan(stage, precision="fp16")
    rows, gradients = pool("deepspeed", cases.WORLD_SIZE).run(train_fp16, chosen, start, tmp_path, ds_config(chosen))[0]
    expected = cases.reference(start, 6)
    kept = [row for row in rows if not row[1].skipped]
    assert all(taken == (0 if norms.skipped else 1) for _, norms, taken in rows)
    assert len(kept) >= 4
    # Ten bits of mantissa; what was skipped delays the rest, so only the first loss is compared.
    assert rows[0][0] == pytest.approx(expected.losses[0], rel=2e-3)
    if not rows[0][1].skipped:
        assert rows[0][1].gradient == pytest.approx(expected.norms[0], rel=5e-3)
        worst = max(float((gradients[n] - g).norm() / g.norm()) for n, g in expected.gradients.items())
        assert worst < 2e-2
