"""A run goes on with fewer nodes than planned: which numbers are legal, what is planned again, and the same curve."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from functools import cache

import pytest

import kit
from kit.emit.deepspeed import ds_config
from kit.emit.megatron import megatron_settings
from kit.emit.run_directory import RunDirectory, write
from kit.errors import EngineError, PlanError, SpecError
from kit.planner.elastic import legal_nodes, on_nodes
from kit.specs.job import OptimizerSpec
from kit.specs.run import BatchRampSpec, CheckpointSpec, DataSpec, RunSpec, ScheduleSpec
from kit.training.__main__ import _announce_nodes
from kit.training.elastic import on_started, wait_as_spare
from tests.support import tiny
from tests.support.refusals import refusal
from tests.training import runs


@cache
def planned(model="llama-3.1-8b", nodes=4, **pins):
    """On nodes of eight H100, 64 sequences of 4,096 tokens a step."""
    job = kit.JobSpec(seq_length=4096, global_batch_size=64, total_tokens=10**9)
    chosen = {"engine": "deepspeed", "implementation": "huggingface", "zero_stage": 3, "tp": 1, "micro_batch_size": 1}
    return kit.plan(model, f"p5.48xlarge:{nodes}", job, kit.Pins(**(chosen | pins)))


MEGATRON = {"engine": "megatron", "implementation": None, "zero_stage": 1}


def test_fewer_nodes_keep_the_batch_and_everything_but_data_parallelism():
    plan = planned()
    assert legal_nodes(plan) == (1, 2, 4)
    two = on_nodes(plan, 2)
    assert (two.layout.dp, two.layout.gradient_accumulation_steps, two.cluster.num_nodes) == (16, 4, 2)
    kept = {"dp": plan.layout.dp, "gradient_accumulation_steps": plan.layout.gradient_accumulation_steps}
    assert dataclasses.replace(two.layout, **kept) == plan.layout
    assert two.layout.global_batch_size == plan.layout.global_batch_size
    assert two.predicted.step_time_s > 1.5 * plan.predicted.step_time_s
    assert on_nodes(plan, 4) is plan


@pytest.mark.parametrize(
    ("model", "planned_on", "pins", "nodes", "why"),
    [
        ("llama-3.1-8b", 4, {}, 3, r"3 of 4 nodes: global_batch_size=64 is no multiple of .* dp=24; use 1 or 2 or 4"),
        ("llama-3.1-8b", 4, {}, 0, "must be from 1 to 4"),
        ("llama-3.1-8b", 4, {}, 5, "must be from 1 to 4"),
        ("llama-3.1-8b", 4, MEGATRON | {"tp": 8, "pp": 2}, 1, "8 GPUs are no multiple"),
        ("llama-3-70b", 8, {"offload_optimizer": "none"}, 1, r"1 of 8 nodes: .* GiB per GPU, .* usable"),
        ("qwen3-30b-a3b", 2, MEGATRON | {"pp": 1, "ep": 16, "micro_batch_size": None}, 1, r"1 of 2 nodes: .*ep"),
    ],
)
def test_other_numbers_are_refused_by_name(model, planned_on, pins, nodes, why):
    """Those that do not divide, do not fit in memory, or that a rule of the engine forbids."""
    assert re.search(why, refusal(PlanError, lambda: on_nodes(planned(model, planned_on, **pins), nodes)))


def emitted(tmp_path, schedule=None, **pins) -> RunDirectory:
    run = RunSpec(data=DataSpec(train="/data/train"), schedule=schedule or ScheduleSpec())
    return write(planned(**pins), run, tmp_path / "run")


@pytest.mark.parametrize(("pins", "derive"), [({}, ds_config), (MEGATRON | {"tp": 8, "pp": 1}, megatron_settings)])
def test_the_engine_reads_what_one_node_would_have_been_given_and_edits_by_hand(
    tmp_path, capsys, monkeypatch, pins, derive
):
    rundir = emitted(tmp_path, **pins)
    rundir = dataclasses.replace(rundir, settings={**rundir.settings, "by_hand": True})
    found = on_started(rundir, 8, 1)
    assert found.settings == {**derive(found.plan), "by_hand": True}
    assert derive(found.plan) != derive(rundir.plan)
    assert found.plan == on_nodes(rundir.plan, 1)
    assert on_started(rundir, 32, 1) is rundir
    monkeypatch.setenv("WORLD_SIZE", "24")
    _announce_nodes(on_started(rundir, 24, 1))
    layout = on_nodes(rundir.plan, 2).layout  # three do not divide the batch: one waits
    assert capsys.readouterr().out == (
        f"elastic: 2 nodes (1 more wait: no layout for 3), dp={layout.dp}, gradient_accumulation_steps="
        f"{layout.gradient_accumulation_steps}, global_batch_size=64\n"
    )


@pytest.mark.parametrize(
    ("processes", "least", "error", "why"),
    [
        (8, 2, EngineError, "8 processes were started and the run needs 2 to 4 nodes of 8"),
        (12, 1, EngineError, "12 processes were started"),
        (32, 3, PlanError, "3 of 4 nodes: global_batch_size=64 is no multiple"),
        (32, 5, PlanError, "5 of 4 nodes: must be from 1 to 4"),
        (40, 1, EngineError, "40 processes were started and the run needs 1 to 4 nodes of 8"),
    ],
)
def test_what_cannot_be_started(tmp_path, processes, least, error, why):
    assert re.search(why, refusal(error, lambda: on_started(emitted(tmp_path), processes, least)))


def test_a_batch_ramp_must_fit_the_smaller_world_too(tmp_path):
    ramp = BatchRampSpec(start=32, increment=32, samples=320)
    rundir = emitted(tmp_path, ScheduleSpec(batch_ramp=ramp))
    assert on_started(rundir, 16, 1).plan.cluster.num_nodes == 2
    odd = dataclasses.replace(rundir.run, schedule=ScheduleSpec(batch_ramp=dataclasses.replace(ramp, start=4)))
    assert "batch_ramp" in refusal(SpecError, lambda: on_started(dataclasses.replace(rundir, run=odd), 16, 1))


@pytest.mark.everyday("ended", "stopped", "half a file")
@pytest.mark.parametrize(
    ("summary", "code"),
    [('{"stopped": null}', 0), ('{"stopped": "SIGTERM"}', 75), ("{", 75), (None, 75)],
    ids=["ended", "stopped", "half a file", "no file"],
)
def test_a_node_that_the_layout_cannot_use_waits_for_the_end(tmp_path, summary, code):
    """A summary of an earlier start does not count; one of a stopped run neither, which torchrun starts again."""
    (tmp_path / "summary.json").write_text('{"stopped": null}')
    found = []
    waiting = threading.Thread(target=lambda: found.append(wait_as_spare(tmp_path, look_s=0.01, lost_s=0.5)))
    waiting.start()
    for _ in range(4):
        time.sleep(0.25)
        (tmp_path / "run.lock").write_text("a heartbeat")
    assert not found
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    waiting.join(10)
    assert found == [code]


@pytest.mark.everyday("adafactor")
@pytest.mark.parametrize("job", [{}, {"optimizer": OptimizerSpec(name="adafactor")}], ids=["adamw", "adafactor"])
def test_a_run_shrinks_and_grows_on_its_curve(tmp_path, job):
    options = {"checkpoint": CheckpointSpec(every_steps=1, keep_last=2)}
    two = tiny.plan(job=job, dp=2, zero_stage=3, gradient_accumulation_steps=1)
    one = tiny.plan(job=job, dp=1, zero_stage=0, gradient_accumulation_steps=2)
    whole = runs.trained(tmp_path / "whole", two, **options)
    rundir = runs.trained(tmp_path / "run", two, 2, **options)
    runs.resumed(dataclasses.replace(rundir, plan=one), 4)
    assert runs.names(rundir.path / "checkpoints") == ["latest", "step-00000003", "step-00000004"]
    runs.resumed(rundir, None)
    runs.near(runs.metrics(rundir), runs.metrics(whole))
