"""A run's checkpoints: which are kept, room on the disk, random generators, writing in a thread, a changed plan."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
import sys
from contextlib import ExitStack, closing

import numpy as np
import pytest
import torch

from kit.cost.reliability import operation
from kit.engines.collective import gather, split_over_ranks
from kit.errors import CheckpointError
from kit.specs.job import OptimizerSpec
from kit.specs.run import CheckpointSpec
from kit.training.checkpoint import random_state, store
from kit.training.checkpoint.checkpoints import RunCheckpoints
from kit.training.checkpoint.manager import CheckpointManager
from kit.training.checkpoint.storage import require_disk_space, steps_kept
from kit.training.counters import Counters
from tests.support import tiny
from tests.support.calls import before
from tests.support.refusals import refusal
from tests.support.small_disk import small_disk
from tests.support.workers import pool
from tests.training import runs

ADAFACTOR = {"optimizer": OptimizerSpec(name="adafactor")}
"""Its means of rows and columns are exact on the layout that wrote them alone."""
ACCUMULATED = {"micro_batch_size": 2, "gradient_accumulation_steps": 2}


def checkpoints(rundir):
    return [name for name in runs.names(rundir.path / "checkpoints") if name.startswith("step")]


# Kept


@runs.one_process
def test_what_they_take_and_cost_is_predicted(tmp_path):
    """By the plan's size of one, as many as the settings keep; beside what lies there at the end."""
    plan = tiny.plan(tiny.model(hidden_size=256, ffn_hidden_size=512, head_dim=64))
    cost = operation(plan.workload, 0.1)
    plan = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, operation=cost))
    spec = CheckpointSpec(every_steps=1, keep_last=2, keep_every_steps=3)
    rundir = runs.trained(tmp_path / "run", plan, steps=8, checkpoint=spec)
    summary = runs.summary(rundir)
    assert checkpoints(rundir) == [f"step-{step:08d}" for step in (3, 6, 7, 8)]
    assert summary.predicted_checkpoint_gib == pytest.approx(summary.measured_checkpoint_gib, rel=0.02)
    assert summary.predicted_storage_gib == pytest.approx(4 * summary.predicted_checkpoint_gib)
    assert summary.measured_storage_gib == pytest.approx(summary.predicted_storage_gib, rel=0.02)
    monthly = 1.073741824 * 0.023 * summary.predicted_storage_gib
    assert summary.predicted_storage_usd_per_month == pytest.approx(monthly)
    assert "checkpoints kept" in summary.beside_prediction()
    assert f"a month of them ${summary.measured_storage_usd_per_month:.2g}" in summary.beside_prediction()


@runs.one_process
@pytest.mark.parametrize(
    ("last", "spec", "kept"),
    [
        (3, CheckpointSpec(), [3]),
        (7, CheckpointSpec(every_steps=2, keep_last=2), [6, 7]),
        (6, CheckpointSpec(every_steps=2, keep_last=9), [2, 4, 6]),
        (8, CheckpointSpec(every_steps=1, keep_last=2, keep_every_steps=3), [3, 6, 7, 8]),
        (7, CheckpointSpec(every_steps=1, keep_last=1, keep_every_steps=3), [3, 6, 7]),
    ],
)
def test_which_are_kept(last, spec, kept):
    assert steps_kept(last, spec) == kept


# Room


@runs.one_process
def test_a_full_disk_fails_the_save_and_not_the_run(whole, tmp_path, capsys):
    """Room for two checkpoints and a half: the third is refused before a byte of it is written."""
    manifest = json.loads((whole.path / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    size = sum(record["bytes"] for record in manifest["files"].values())
    with ExitStack() as around:
        try:
            around.enter_context(small_disk(tmp_path / "run" / "checkpoints", int(2.6 * size)))
        except OSError as error:
            pytest.skip(f"a full disk (RLIMIT_FSIZE stands in elsewhere) needs the right to mount, as root: {error}")
        rundir = runs.trained(tmp_path / "run", checkpoint=CheckpointSpec(every_steps=1, keep_last=9))
        printed = capsys.readouterr().out
        assert "no checkpoint at step 3, the run goes on: a checkpoint takes" in printed
        assert f"and {rundir.path / 'checkpoints'} has" in printed
        assert checkpoints(rundir) == ["step-00000001", "step-00000002"]
        assert runs.metrics(rundir) == runs.metrics(whole)
        told = [(event["event"], event["step"]) for event in runs.events(rundir)]
        assert told == [("checkpoint failed", step) for step in (3, 4, 5, 6)]


@runs.one_process
def test_what_a_thread_could_not_write_is_told_with_the_next_one(tmp_path, monkeypatch):
    def fail(self, state, counters, *more, **options):
        if counters.step == 2:
            raise CheckpointError("no room")

    before(monkeypatch, RunCheckpoints, "write", fail)
    rundir = runs.trained(tmp_path / "run", checkpoint=CheckpointSpec(every_steps=2, asynchronous=True))
    assert [(e["event"], e["step"], e["why"]) for e in runs.events(rundir)] == [("checkpoint failed", 4, "no room")]
    assert checkpoints(rundir) == ["step-00000004", "step-00000006"]


@runs.one_process
def test_the_first_one_is_as_large_as_predicted(tmp_path):
    require_disk_space(tmp_path / "not" / "yet", 1)
    assert re.search(
        r"takes 1048576\.00 GiB and .* GiB left; free some space",
        refusal(CheckpointError, require_disk_space, tmp_path, 1 << 50),
    )


def test_every_generator_goes_on_where_it_was(tmp_path):
    def draw():
        return random.random(), random.gauss(0, 1), float(np.random.normal()), torch.rand(3).tolist()

    draw()
    random_state.write(random_state.capture(), tmp_path, 0)
    first, other = draw(), draw()
    random_state.read(tmp_path, 0)
    assert draw() == first != other
    (tmp_path / "rank-00000.json").write_text('{"python": [3, [1], null]}')
    assert "is not what kit writes of random generators" in refusal(CheckpointError, random_state.read, tmp_path, 0)


def _draws_after_load(rundir, root):
    """(numbers this rank would have drawn after the save, those it draws after the load)."""
    import torch.distributed as dist

    from kit.engines.torch.engine import TorchEngine

    with closing(TorchEngine(rundir)) as engine:
        kept = RunCheckpoints(root, rundir.plan, keep_last=1)
        torch.manual_seed(100 + dist.get_rank())
        kept.write(store.state_of(engine), Counters(1, 4, 128, 1, 0), engine.is_main)
        expected = torch.rand(4).tolist()
        torch.manual_seed(0)
        kept.load(engine, kept.directory(1))
        found = torch.rand(4).tolist()
    shares = gather(split_over_ranks([*range(7)]))  # which two ranks do not divide
    assert sorted(item for share in shares for item in share) == [*range(7)]
    return expected, found


def test_each_rank_has_its_own_generators_and_a_share_of_the_work(tmp_path):
    """Of checking files: test_damage flips a bit of each of them."""
    rundir = tiny.run_directory(tmp_path / "run", tiny.plan(dp=2))
    ranks = pool("torch", 2).run(_draws_after_load, rundir, tmp_path / "checkpoints")
    assert ranks[0][0] != ranks[1][0]
    for expected, found in ranks:
        assert found == expected


@runs.one_process
def test_a_thread_writes_the_generators_of_the_step_that_it_saves(tmp_path, monkeypatch):
    """The next step draws before the thread has written anything."""
    asked = []
    before(monkeypatch, CheckpointManager, "save", lambda *_: asked.append(random.getstate()))
    before(monkeypatch, CheckpointManager, "_write", lambda *_: random.random())
    rundir = runs.trained(tmp_path / "run", stop_at_step=2, checkpoint=CheckpointSpec(every_steps=2, asynchronous=True))
    random_state.read(rundir.path / "checkpoints" / "step-00000002" / "random", 0)
    assert random.getstate() == asked[0]


def test_a_run_that_fails_does_not_wait_for_its_writer():
    """Whose ranks, or disk, may answer no more."""
    failing = "import time; from kit.training.checkpoint.manager import _in_thread; _in_thread(lambda: time.sleep(999))"
    subprocess.run([sys.executable, "-c", failing], check=True, timeout=60)


@runs.one_process
@pytest.mark.parametrize("job", [{}, ADAFACTOR], ids=["adamw", "adafactor"])
def test_with_a_changed_plan_auto_goes_on_after_the_same_step(tmp_path, capsys, job):
    plan = tiny.plan(job=job, micro_batch_size=4)
    whole = runs.trained(tmp_path / "whole", plan)
    rundir = runs.trained(tmp_path / "run", plan, stop_at_step=4)
    assert "another plan" not in capsys.readouterr().out
    runs.resumed(dataclasses.replace(rundir, plan=tiny.plan(job=job, **ACCUMULATED)), None)
    said = capsys.readouterr().out
    assert "step-00000004 was written under another plan: its state is spread anew" in said
    assert "resumed after step 4" in said
    runs.near(runs.metrics(rundir), runs.metrics(whole))


BY_A_THREAD = ("torch", 0), ("torch", 3), ("deepspeed", 1), ("deepspeed", 3)
EXACT = {
    "adafactor": {"zero_stage": 2, "job": ADAFACTOR},
    "adamw-8bit": {"zero_stage": 2, "job": {"optimizer": OptimizerSpec(name="adamw-8bit")}},
    "lion-8bit on DeepSpeed": {
        "engine": "deepspeed", "zero_stage": 3, "job": {"optimizer": OptimizerSpec(name="lion-8bit")},
    },
    "experts": {"zero_stage": 3, "spec": tiny.model("mixtral")},
    "bf16 on DeepSpeed": {"engine": "deepspeed", "zero_stage": 2, "job": {"precision": "bf16"}},
    "Megatron": {"engine": "megatron", "implementation": "local", "zero_stage": 1, "job": {"precision": "bf16"}},
    **{f"{engine} {stage} by a thread": {"engine": engine, "zero_stage": stage} for engine, stage in BY_A_THREAD},
}  # fmt: skip


@pytest.mark.everyday("adamw-8bit", "experts", "Megatron", "torch 3 by a thread")
@pytest.mark.parametrize("name", EXACT)
def test_the_same_plan_goes_on_bit_for_bit(tmp_path, name):
    """Also from what a thread wrote, which is as much."""
    spec = CheckpointSpec(every_steps=2, keep_last=9, asynchronous="thread" in name)
    _, stopped = runs.same_curve(tmp_path, tiny.plan(**({"dp": 2} | EXACT[name])), (5,), checkpoint=spec)
    assert checkpoints(stopped) == [f"step-{step:08d}" for step in (2, 4, 5, 6)]
