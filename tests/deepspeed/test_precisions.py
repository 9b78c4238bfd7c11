"""fp16 with loss scaling, and autocast over fp32 weights.

DeepSpeed refuses fp16 on CPU processes because they are slow at it, not because they could not: here its accelerator is
told to say yes, and everything else is DeepSpeed's own.
"""

from __future__ import annotations

import math

import pytest
import torch

from kit.emit.deepspeed import ds_config
from kit.emit.extra import with_extra
from kit.engines.protocol import StateKind
from kit.errors import EngineError
from kit.specs.extra import Extra
from tests.deepspeed import cases, plain
from tests.deepspeed.cases import run
from tests.support.refusals import refusal


def six_steps(engine, chosen):
    """(loss, norms, steps taken) of each, and gradients of the first."""
    rows, gradients = [], {}
    for step in range(6):
        loss = engine.forward_backward(cases.micro_batches(engine, chosen, step)).mean
        if step == 0:
            gradients = cases.exported(engine, StateKind.GRADIENT)
        before = engine.optimizer_steps
        norms = engine.apply(plain.learning_rate(step))
        rows.append((loss, norms, engine.optimizer_steps - before))
    return rows, gradients


@pytest.mark.everyday("1")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_trains_like_fp32(stage, references, tmp_path):
    start, expected = references()
    rows, gradients = run(cases.inside, cases.plan(stage, precision="fp16"), start, tmp_path, six_steps)
    assert all(taken == (0 if norms.skipped else 1) for _, norms, taken in rows)
    assert sum(not norms.skipped for _, norms, _ in rows) >= 4
    # Ten bits of mantissa; what was skipped delays the rest, so only the first loss is compared.
    assert rows[0][0] == pytest.approx(expected.losses[0], rel=2e-3)
    if not rows[0][1].skipped:
        assert rows[0][1].gradient == pytest.approx(expected.norms[0], rel=5e-3)
        assert max(float((gradients[n] - g).norm() / g.norm()) for n, g in expected.gradients.items()) < 2e-2


def unscaled(engine, chosen):
    """The gradient that backward leaves and the scale that the step divides it by, without ZeRO."""
    engine.forward_backward(cases.micro_batches(engine, chosen, 0))
    held = dict(engine._engine.module.named_parameters())["model.norm.weight"].grad.float().clone()
    return held, engine._engine.optimizer.loss_scale_config.cur_scale


@pytest.mark.nightly
def test_without_zero_deepspeed_divides_by_a_scale_that_it_never_applied(references, tmp_path):
    """Why a rule refuses it; when this fails, DeepSpeed has been mended and the rule can go."""
    start, curve = references()
    chosen = cases.plan(0, precision="fp16", micro_batch_size=4, gradient_accumulation_steps=1)
    held, scale = run(cases.inside, chosen, start, tmp_path, unscaled)
    expected = curve.gradients["model.norm.weight"]
    assert scale == 65536
    assert float((held - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.everyday("2")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_skips_the_step_and_halves_the_scale(stage, start, tmp_path):
    """A scale of 2^40 overflows for certain: the first steps change nothing, and none of them is an error."""
    chosen = cases.plan(stage, precision="fp16")
    settings = ds_config(chosen)
    settings["fp16"] |= {"initial_scale_power": 40, "hysteresis": 1}
    rows, _ = run(cases.inside, chosen, start, tmp_path, six_steps, {"settings": settings})
    assert all(norms.skipped and math.isinf(norms.gradient) and taken == 0 for _, norms, taken in rows)
    assert [norms.loss_scale for _, norms, _ in rows] == [2.0 ** (40 - step) for step in range(6)]


def at_the_minimum(engine, chosen):
    engine.forward_backward(cases.micro_batches(engine, chosen, 0))
    return refusal(EngineError, engine.apply, 1e-3)


def test_an_overflow_at_the_smallest_scale_ends_the_run(start, tmp_path):
    chosen = cases.plan(2, precision="fp16")
    settings = ds_config(chosen)
    settings["fp16"] |= {"initial_scale_power": 40, "hysteresis": 1, "min_loss_scale": 2**40}
    said = run(cases.inside, chosen, start, tmp_path, at_the_minimum, {"settings": settings})
    assert "overflow at optimizer step 1 though fp16's loss scale is at its minimum" in said


@pytest.mark.everyday("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_autocast_keeps_what_is_no_matrix_in_fp32(stage, references, tmp_path):
    """Nearer to fp32 than bf16 weights are: these are rounded once more, at each step."""
    start, expected = references()
    curves = [
        run(cases.train, cases.plan(stage, precision="bf16", autocast=autocast), start, tmp_path / str(autocast), 3)
        for autocast in (True, False)
    ]
    under_autocast, in_bf16 = (plain.gradient_error(curve, expected) for curve in curves)
    assert under_autocast < in_bf16 < 0.1
    assert plain.curve_error(curves[0].losses, expected.losses) < 1e-3
    if stage == 3:  # weights are partitioned while they are made: in fp32, which master weights are cloned from
        masters = run(cases.initial, cases.plan(stage, precision="bf16", autocast=True), None, tmp_path)
        assert not any(torch.equal(m, m.bfloat16().float()) for m in masters.values() if m.ndim > 1)


def three_steps(engine, chosen):
    return cases.advance(engine, chosen, 0, 3)[:2]


def test_the_flops_profiler_and_a_monitor_change_nothing_and_write_what_they_say(references, tmp_path):
    """A profile of the second step of two micro batches, and a monitor that needs no package."""
    start, expected = references()
    profile = {"enabled": True, "profile_step": 1, "output_file": str(tmp_path / "flops_profile.txt")}
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "csv_monitor"}
    chosen = with_extra(cases.plan(2), Extra(deepspeed={"flops_profiler": profile, "csv_monitor": monitor}))
    losses, norms = run(cases.inside, chosen, start, tmp_path, three_steps)
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert norms == pytest.approx(expected.norms, rel=1e-5)
    assert "Profile Summary at step 2" in (tmp_path / "flops_profile.txt").read_text()
    rates = [line.split(",") for line in (tmp_path / "csv_monitor" / "Train_Samples_lr.csv").read_text().splitlines()]
    assert [float(rate) for _, rate in rates[1:]] == pytest.approx([plain.learning_rate(step) for step in range(3)])
