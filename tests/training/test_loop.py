"""The loop: what a run leaves behind, and that an interrupted run is the same run."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from kit.engines.torch.engine import TorchEngine
from kit.errors import DataError
from kit.planner.length import length
from kit.specs.run import DataSpec, LoggingSpec
from kit.training.checkpoint.manifest import Checkpoint
from kit.training.data.indexed import IndexedTokens
from kit.training.data.loader import DataLoader
from kit.training.data.samples import GptSamples
from kit.training.loop import _Run
from kit.training.step_timing import StepClock
from kit.training.stopping import Reason, Stopping
from tests.support import tiny
from tests.support.calls import before
from tests.support.checkpoints import same_state
from tests.support.workers import pool
from tests.training import runs

# What a run leaves


@runs.one_process
def test_everything(tmp_path, capsys):
    """Of five steps: a budget of tokens that a sixth would exceed by one."""
    plan = tiny.plan(job={"total_tokens": 64 * 5 + 63})
    logging = LoggingSpec(every_steps=2, gradients_at_steps=(1, 3))
    rundir = runs.prepare(tmp_path / "run", plan, steps=None, validation_every_steps=2, logging=logging)
    assert length(plan, rundir.run) == (5, 10)
    summary = runs.run(rundir)
    rows = runs.metrics(rundir)
    assert [(row["step"], row["samples_seen"], row["tokens"]) for row in rows] == [
        (step, 2 * step, 64) for step in (1, 2, 3, 4, 5)
    ]
    assert [row["validation_loss"] is None for row in rows] == [True, False, True, False, False]
    assert runs.names(rundir.path / "gradients") == ["step-000001.safetensors", "step-000003.safetensors"]
    gradients = load_file(rundir.path / "gradients" / "step-000003.safetensors").values()
    norm = sum(gradient.double().square().sum() for gradient in gradients).sqrt().item()
    assert rows[2]["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert runs.names(rundir.path / "checkpoints") == ["latest", "step-00000004", "step-00000005"]
    assert (rundir.path / "checkpoints" / "latest").read_text() == "step-00000005\n"
    assert Checkpoint(rundir.path / "checkpoints" / "step-00000005").manifest.counters.tokens_seen == 5 * 64
    written = json.loads((rundir.path / "summary.json").read_text())
    assert written == dataclasses.asdict(summary)
    assert (written["loss"], written["validation_loss"]) == (rows[-1]["loss"], rows[-1]["validation_loss"])
    assert written["checkpoint"] == "checkpoints/step-00000005"
    printed = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert printed[:-1] == ["step 2/5", "step 4/5", "step 5/5"]
    assert printed[-1].startswith("measured: step ")


@runs.one_process
def test_the_summary_has_the_validation_of_the_last_step(tmp_path, whole):
    """Also where a run is stopped between two of those that are logged; none without held-out data."""
    found = []
    for every, data in ((1, whole.run.data), (2, whole.run.data), (2, DataSpec(train=whole.run.data.train))):
        rundir = runs.trained(tmp_path / str(len(found)), None, 3, data=data, validation_every_steps=every)
        found.append((runs.summary(rundir).validation_loss, runs.metrics(rundir)[2]["validation_loss"]))
    last = found[0][1]
    assert found == [(last, last), (last, None), (None, None)]
    assert last > 0


def test_the_parts_of_a_step_are_added_up(monkeypatch):
    """A clock that is read nine times: two parts in the first turn, one of them twice; then the next two turns."""
    times = iter([0.0, 1.0, 3.0, 3.0, 7.0, 8.0, 8.5, 10.0, 26.0])
    monkeypatch.setattr("kit.training.step_timing.time.perf_counter", lambda: next(times))
    clock = StepClock(kept_turns=1)
    clock.turn()
    assert (clock.gap_s, clock.pace_s) == (None, None)
    for name in ("data", "validation", "data"):
        with clock.part(name):
            pass
    assert (clock.parts_s, clock.step_s) == ({"data": 2.5, "validation": 4.0}, 2.5)
    clock.turn()
    assert (clock.gap_s, clock.pace_s, clock.parts_s) == (10.0 - 6.5, 10.0, {})
    clock.turn()
    assert (clock.gap_s, clock.pace_s) == (16.0, 16.0), "of the last turn alone"


def same_end(whole, rundir):
    assert runs.metrics(rundir) == runs.metrics(whole)
    assert same_state(*(Checkpoint(each.path / "checkpoints" / "step-00000006") for each in (rundir, whole)))


# Interrupted


@runs.one_process
def test_stopped_and_resumed(whole, tmp_path, capsys):
    rundir = runs.prepare(tmp_path / "run")
    runs.resumed(rundir, 3, 6)
    lines = capsys.readouterr().out.split("\nmeasured:")
    assert "starting at step 1\n" in lines[0]
    assert "\nresumed after step 3\nstep 4/6" in lines[1]
    same_end(whole, rundir)


@runs.one_process
def test_from_a_path(whole, stopped, tmp_path):
    """Of a checkpoint, and of the run that has it, from another run; of its own newest checkpoint."""
    first, before = stopped.path, runs.metrics(stopped)
    other, another = (runs.prepare(tmp_path / name, seed=99) for name in ("other", "another"))
    for rundir, place in (
        (other, first / "checkpoints" / "step-00000004"),
        (another, first),
        (stopped, first / "checkpoints" / "step-00000004"),
    ):
        runs.run(rundir, resume=place)
        assert before + runs.metrics(rundir)[-2:] == runs.metrics(whole)
    same_end(whole, stopped)


@runs.one_process
def test_a_checkpoint_goes_on_with_another_batch_size(stopped, tmp_path):
    """What it has seen is then not what this run's schedule says of so many steps."""
    shutil.copytree(stopped.path / "checkpoints" / "step-00000004", tmp_path / "copied")
    second = runs.trained(tmp_path / "second", tiny.plan(gradient_accumulation_steps=2), resume=tmp_path / "copied")
    assert [row["samples_seen"] for row in runs.metrics(second)] == [12, 16]


@runs.one_process
def test_a_finished_run_is_left_as_it_is(whole):
    manifest = whole.path / "checkpoints" / "step-00000006" / "manifest.json"
    before = runs.metrics(whole), manifest.stat().st_mtime_ns
    summary = runs.run(whole, resume="auto")
    assert (summary.step, summary.validation_loss) == (6, before[0][-1]["validation_loss"])
    measured = summary.measured_memory_gib, summary.measured_step_time_s, summary.measured_checkpoint_s
    assert measured == (None, None, None), "this process made no step"
    assert (runs.metrics(whole), manifest.stat().st_mtime_ns) == before


@runs.one_process
def test_without_wrap_an_epoch_is_enough_or_the_run_is_refused(whole, tmp_path):
    path = whole.run.data.train
    samples = len(GptSamples(IndexedTokens(path), tiny.SEQ_LENGTH, tiny.VOCAB_SIZE))
    steps = samples // whole.plan.layout.global_batch_size
    says = rf"needs .* samples and .* has {samples:,}.*use run.steps={steps}, or wrap=true"
    for name, count, refused in (
        ("enough", steps, nullcontext()),
        ("more", steps + 1, pytest.raises(DataError, match=says)),
    ):
        with refused:
            runs.trained(tmp_path / name, None, 1, data=DataSpec(train=path, wrap=False), steps=count)
    assert not (tmp_path / "more" / "metrics.jsonl").exists()


def two_processes(path: Path, dp: int = 2, zero_stage: int = 0):
    spec = tiny.model(ffn_hidden_size=63)  # odd: FSDP2's slices are unequal
    layout = {"micro_batch_size": 2, "gradient_accumulation_steps": 4 // dp, "zero_stage": zero_stage}
    return runs.prepare(path, tiny.plan(spec, dp=dp, **layout))


@pytest.mark.everyday("3")
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_two_processes_are_one_and_a_resumed_run_is_the_same_run(tmp_path, zero_stage):
    """Bit for bit from the own checkpoint, and on one process. Where one rank's part of it is damaged: test_damage."""
    one, alone = (two_processes(tmp_path / name, dp=1) for name in ("one", "alone"))
    whole, stopped = (two_processes(tmp_path / name, zero_stage=zero_stage) for name in ("whole", "stopped"))
    (of_one,) = runs.everywhere(one, runs.run)
    unmeasured = {"measured_step_time_s": None, "measured_checkpoint_s": None}
    two, other = (dataclasses.replace(found, **unmeasured) for found in runs.everywhere(whole, runs.run))
    assert (two, two.validation_loss) == (other, pytest.approx(of_one.validation_loss, rel=1e-5))
    runs.near(runs.metrics(whole), runs.metrics(one))
    runs.resumed(stopped, 3)
    (message,) = set(runs.everywhere(stopped, runs.run_failing))
    assert "continue it with --resume auto" in message
    runs.everywhere(alone, runs.run, None, stopped.path)
    runs.near(runs.metrics(alone), runs.metrics(whole)[3:])
    runs.resumed(stopped, None)
    assert runs.metrics(stopped) == runs.metrics(whole)


def unlike_ranks(rundir):
    """Rank 1 waits for the data of step 2, has more memory, and has the weaker reason to stop after step 3."""
    rank, agree, found, positions = dist.get_rank(), _Run._agree, [], [0]

    def agreed(self, counters):
        found.append(agree(self, counters))
        return found[-1]

    reason = (Reason.SIGTERM, Reason.TIME_LIMIT)[rank]
    with pytest.MonkeyPatch.context() as patch:
        before(patch, DataLoader, "step", lambda _, position, *more: positions.append(position))
        before(patch, DataLoader, "step", lambda _, position, *more: time.sleep(0.3 * rank * (position == 4)))
        patch.setattr(_Run, "_agree", agreed)
        patch.setattr("kit.training.loop.peak_gib", lambda plan: 2.5 + rank)
        patch.setattr(Stopping, "mine", lambda self: reason if positions[-1] == 8 else Reason.NONE)
        patch.setattr(TorchEngine, "memory_bytes", lambda self: {"weights": (1 + rank) * 2**30, "gradients": 2**29})
        return runs.run(rundir), [each.memory_gib for each in found]


def test_what_is_logged_is_of_all_ranks(tmp_path):
    rundir = runs.prepare(tmp_path / "run", tiny.plan(dp=2))
    for summary, memory in pool("torch", 2).run(unlike_ranks, rundir):
        assert (summary.step, summary.stopped, memory) == (3, "SIGTERM", [3.5] * 3)
        memory = summary.measured_memory_gib, summary.measured_memory_is
        assert memory == (2.5, "weights, gradients and optimizer")
        assert summary.tokens_seen == 3 * 4 * tiny.SEQ_LENGTH
    rows = runs.steps(rundir)
    assert [row["data_s"] >= 0.3 for row in rows] == [False, True, False]
    for row in rows:
        assert row["tokens_per_s"] * row["step_time_s"] == pytest.approx(4 * tiny.SEQ_LENGTH)
        assert row["tokens_per_s_per_gpu"] == row["tokens_per_s"] / 2
