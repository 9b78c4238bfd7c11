"""A gradient that explodes or is not finite, on every engine: it is seen before the optimizer step, and left out."""

from __future__ import annotations

import json
import math
import re
from contextlib import closing

import pytest
import torch

from kit.specs.run import CheckpointSpec, StabilitySpec
from kit.training.checkpoint.manifest import Checkpoint
from tests.support import tiny
from tests.support.calls import before
from tests.support.workers import pool
from tests.training import runs
from tests.training.cases import build

AT = 5
"""Step, from 1, whose gradient is spoiled."""
LAYOUTS = {
    "torch fsdp2": {"engine": "torch", "dp": 2, "zero_stage": 3},
    **{f"deepspeed zero {stage}": {"engine": "deepspeed", "dp": 2, "zero_stage": stage} for stage in range(4)},
    "deepspeed zero 2 offload": {"engine": "deepspeed", "dp": 2, "zero_stage": 2, "offload_optimizer": "cpu"},
    "deepspeed zero 3 offload": {"engine": "deepspeed", "dp": 2, "zero_stage": 3, "offload_optimizer": "cpu"},
    "megatron tp": {"engine": "megatron", "tp": 2, "implementation": "local"},
    "megatron zero 1": {"engine": "megatron", "dp": 2, "zero_stage": 1, "implementation": "local"},
    "megatron pp": {"engine": "megatron", "pp": 2, "implementation": "local"},
}


def spoiled_run(rundir, factor):
    """A run in which the gradient at the output of one module is so many times as large in step AT. Returns what it
    says where it fails."""
    from kit.training.data.loader import DataLoader

    positions = []

    def hook(module, inputs, output):
        tensor = output[0] if isinstance(output, tuple) else output
        if positions[-1] // rundir.plan.layout.global_batch_size + 1 == AT and tensor.requires_grad:
            tensor.register_hook(lambda gradient: gradient * factor)

    with closing(build(rundir)) as engine, pytest.MonkeyPatch.context() as patch:
        for name in filter(re.compile(r"layers\.1\.mlp\.(linear_fc1|up_proj)$").search, engine.modules()):
            engine.modules()[name].register_forward_hook(hook)
        before(patch, DataLoader, "step", lambda _, position, *more: positions.append(position))
        return error_of(engine, rundir)


def error_of(engine, rundir):
    """What the run says where it fails."""
    from kit.errors import KitError
    from kit.training.loop import train

    try:
        train(engine, rundir)
    except KitError as error:
        return str(error)
    return ""


def prepared(path, layout, **stability):
    spec = StabilitySpec(window_steps=8, sigmas=100.0, loss_spike="off", **stability)
    chosen = tiny.plan(tiny.model(num_layers=4 if "pp" in layout else 2), **layout)
    return runs.prepare(path, chosen, steps=7, stability=spec, checkpoint=CheckpointSpec())


@pytest.mark.everyday("torch fsdp2")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gradient_spike_is_discarded_before_the_step(tmp_path, name):
    """The step is never applied: a spike of another height leaves the same curve after it."""
    layout = LAYOUTS[name]
    curves = []
    for factor in (1e3, 1e5):
        rundir = prepared(tmp_path / str(factor), layout, gradient_spike="discard")
        assert set(pool(layout["engine"], 2).run(spoiled_run, rundir, factor)) == {""}
        rows = runs.metrics(rundir)
        assert [row["step"] for row in rows if row["grad_norm"] is None] == [AT]
        assert rows[AT - 1]["event"] == "gradient spike: discard"
        (event,) = (json.loads(line) for line in (rundir.path / "events.jsonl").read_text().splitlines())
        size = layout.get("dp", 1) * 2
        assert event["samples"] == [size * (AT - 1), size * AT - 1]
        curves.append([(row["loss"], row["grad_norm"]) for row in rows])
    assert curves[0] == curves[1]


@pytest.mark.everyday("megatron pp")
@pytest.mark.parametrize("name", ["deepspeed zero 0", "deepspeed zero 2", "deepspeed zero 3", "megatron pp"])
def test_what_is_not_finite_is_named(tmp_path, name):
    """Before the step, on every engine alike: weights are as they were, so the replay shows where it comes from."""
    layout = LAYOUTS[name]
    rundir = prepared(tmp_path / "run", layout)
    said = pool(layout["engine"], 2).run(spoiled_run, rundir, math.inf)
    assert len(set(said)) == 1, "every rank says the same"
    assert re.match(rf"gradient norm is (inf|nan) at step {AT}; resume from the last checkpoint", said[0]), said[0]
    assert re.search(r"in backward the gradient at the output of \S+ \(\w+\) is not finite \(rank \d\)", said[0])
    assert [row["step"] for row in runs.metrics(rundir)] == list(range(1, AT))


def fp16_run(rundir, power):
    """What a run in fp16 says where it fails, and its optimizer steps."""
    given = runs.with_settings(rundir)
    given.settings["fp16"] |= {"initial_scale_power": power, "hysteresis": 1}
    with closing(build(given)) as engine:
        if power < 1:
            for parameter in engine.modules()["model.norm"].parameters():
                parameter.register_hook(lambda gradient: gradient * torch.inf)
        return error_of(engine, given), engine.optimizer_steps


def fp16_plan(stage):
    return tiny.plan(engine="deepspeed", dp=2, zero_stage=stage, job={"precision": "fp16"})


@pytest.mark.everyday("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_of_fp16_halves_the_scale_and_the_run_goes_on(tmp_path, stage):
    """From 2^26 the first steps overflow. They are told of, count as no step of the optimizer, and are no error."""
    rundir = runs.prepare(tmp_path / "run", fp16_plan(stage), steps=16, checkpoint=CheckpointSpec())
    error, optimizer_steps = pool("deepspeed", 2).run(fp16_run, rundir, 26)[0]
    rows = runs.metrics(rundir)
    skipped = [row["grad_norm"] is None for row in rows]
    scales = [row["loss_scale"] for row in rows]
    assert skipped[:3] == [True] * 3
    assert scales[0] == 2.0**26
    assert scales[1:] == [scale / 2 if skip else scale for scale, skip in zip(scales, skipped, strict=True)][:-1]
    assert all(row["event"] is None for row in rows)
    assert (error, len(rows), optimizer_steps) == ("", 16, skipped.count(False))
    assert (
        Checkpoint(rundir.path / "checkpoints" / "step-00000016").manifest.counters.optimizer_steps == optimizer_steps
    )
    assert optimizer_steps >= 5


def test_an_overflow_at_the_least_scale_ends_the_run_with_words(tmp_path):
    rundir = runs.prepare(tmp_path / "run", fp16_plan(2), steps=4, checkpoint=CheckpointSpec())
    said, _ = pool("deepspeed", 2).run(fp16_run, rundir, 0)[0]
    assert "gradients overflow at optimizer step 1 though fp16's loss scale is at its minimum of 1" in said
