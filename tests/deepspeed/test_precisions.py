"""fp16 with loss scaling, and autocast over fp32 weights.

DeepSpeed refuses fp16 on CPU processes because they are slow at it, not because they could not: here its accelerator is
told to say yes, and everything else is DeepSpeed's own.
"""

from __future__ import annotations

import math

import pytest
import torch

from kit.emit.deepspeed import ds_config
from kit.engines.base import StateKind
from tests.deepspeed import cases, plain
from tests.support.workers import pool


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return cases.hf_directory(tmp_path_factory.mktemp("precisions"))


def train_fp16(chosen, start, directory, settings):
    """Losses, norms, which steps were skipped, the scale after each, and gradients of the first."""
    engine = cases.build(chosen, start, directory, settings)
    rows, gradients = [], {}
    for step in range(6):
        loss = engine.forward_backward(cases.micro_batches(engine, chosen, step)).mean
        if step == 0:
            gradients = cases.exported(engine, StateKind.GRADIENT)
        before = engine.optimizer_steps
        norms = engine.apply(plain.learning_rate(step))
        rows.append((loss, norms, engine.optimizer_steps - before))
    engine.close()
    return rows, gradients


@pytest.mark.everyday("1")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_trains_like_fp32(stage, start, tmp_path):
    chosen = cases.plan(stage, precision="fp16")
    rows, gradients = pool("deepspeed", cases.WORLD_SIZE).run(train_fp16, chosen, start, tmp_path, ds_config(chosen))[0]
    expected = plain.reference(start, 6)
    kept = [row for row in rows if not row[1].skipped]
    assert all(taken == (0 if norms.skipped else 1) for _, norms, taken in rows)
    assert len(kept) >= 4
    # Ten bits of mantissa; what was skipped delays the rest, so only the first loss is compared.
    assert rows[0][0] == pytest.approx(expected.losses[0], rel=2e-3)
    if not rows[0][1].skipped:
        assert rows[0][1].gradient == pytest.approx(expected.norms[0], rel=5e-3)
        worst = max(float((gradients[n] - g).norm() / g.norm()) for n, g in expected.gradients.items())
        assert worst < 2e-2


def unscaled(chosen, start, directory):
    """The gradient that backward leaves and the scale that the step divides it by, without ZeRO."""
    engine = cases.build(chosen, start, directory)
    engine.forward_backward(cases.micro_batches(engine, chosen, 0))
    held = dict(engine._engine.module.named_parameters())["model.norm.weight"].grad.float().clone()
    scale = engine._engine.optimizer.loss_scale_config.cur_scale
    engine.close()
    return held, scale


def test_without_zero_deepspeed_divides_by_a_scale_that_it_never_applied(start, tmp_path):
    """Why a rule refuses it; when this fails, DeepSpeed has been mended and the rule can go."""
    chosen = cases.plan(0, precision="fp16", micro_batch_size=4, gradient_accumulation_steps=1)
    held, scale = pool("deepspeed", cases.WORLD_SIZE).run(unscaled, chosen, start, tmp_path)[0]
    expected = plain.reference(start, 1).gradients["model.norm.weight"]
    assert scale == 65536
    assert float((held - expected).norm() / expected.norm()) < 2e-2


def test_an_overflow_skips_the_step_and_halves_the_scale(start, tmp_path):
    """A scale of 2^40 overflows for certain: the first steps change nothing, and none of them is an error."""
    chosen = cases.plan(2, precision="fp16")
    settings = ds_config(chosen)
    settings["fp16"] |= {"initial_scale_power": 40, "hysteresis": 1}
    rows, _ = pool("deepspeed", cases.WORLD_SIZE).run(train_fp16, chosen, start, tmp_path, settings)[0]
    assert all(norms.skipped and math.isinf(norms.gradient) and taken == 0 for _, norms, taken in rows)


def train(chosen, start, directory):
    return cases.train(chosen, start, directory, 3)


@pytest.mark.everyday("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_autocast_keeps_what_is_no_matrix_in_fp32(stage, start, tmp_path):
    """Nearer to fp32 than bf16 weights are: these are rounded once more, at each step."""
    expected = plain.reference(start, 3)
    curves = {
        autocast: pool("deepspeed", cases.WORLD_SIZE).run(
            train, cases.plan(stage, precision="bf16", autocast=autocast), start, tmp_path / str(autocast)
        )[0]
        for autocast in (True, False)
    }
    errors = {autocast: plain.gradient_error(curve, expected) for autocast, curve in curves.items()}
    assert errors[True] < errors[False] < 0.1
    assert plain.curve_error(curves[True].losses, expected.losses) < 1e-3
    if stage == 3:  # weights are partitioned while they are made: in fp32, which master weights are cloned from
        chosen = cases.plan(stage, precision="bf16", autocast=True)
        masters = pool("deepspeed", cases.WORLD_SIZE).run(cases.initial, chosen, None, tmp_path)[0]
        assert not any(torch.equal(m, m.bfloat16().float()) for m in masters.values() if m.ndim > 1)


def observed(chosen, start, directory):
    """Two steps of two micro batches, with a profile of the second and a monitor that needs no package."""
    from kit.specs.run import LoggingSpec

    logging = LoggingSpec(flops_profiler_at_step=2, monitors=("csv_monitor",))
    engine = cases.build(chosen, start, directory, logging=logging)
    losses, norms, _ = cases.advance(engine, chosen, 0, 3)
    engine.close()
    return losses, norms


def test_the_flops_profiler_and_a_monitor_change_nothing_and_write_what_they_say(start, tmp_path):
    chosen = cases.plan(2)
    losses, norms = pool("deepspeed", cases.WORLD_SIZE).run(observed, chosen, start, tmp_path)[0]
    expected = plain.reference(start, 3)
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert norms == pytest.approx(expected.norms, rel=1e-5)
    profile = (tmp_path / "flops_profile.txt").read_text()
    assert "Profile Summary at step 2" in profile
    rates = [line.split(",") for line in (tmp_path / "csv_monitor" / "Train_Samples_lr.csv").read_text().splitlines()]
    assert [float(rate) for _, rate in rates[1:]] == pytest.approx([plain.learning_rate(step) for step in range(3)])
