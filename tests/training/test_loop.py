"""The loop: what a run leaves behind, and that an interrupted run is the same run."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from kit.engines.torch.engine import TorchEngine
from kit.errors import CheckpointError, DataError
from kit.planner.length import length
from kit.specs.run import CheckpointSpec, DataSpec, LoggingSpec
from kit.training.checkpoint.exchange import ExchangeCheckpoint
from kit.training.data.indexed import IndexedTokens
from kit.training.data.loader import DataLoader
from kit.training.data.samples import GptSamples
from kit.training.loop import _Run
from kit.training.step_timing import StepClock
from kit.training.stopping import Reason, Stopping
from tests.support import tiny
from tests.support.workers import pool
from tests.training import runs
from tests.training.disk import full_disk

one_process = pytest.mark.usefixtures("one_process")


@one_process
class TestWhatARunLeaves:
    def test_everything(self, tmp_path, capsys):
        rundir = runs.prepare(
            tmp_path / "run",
            steps=5,
            validation_every_steps=2,
            logging=LoggingSpec(every_steps=2, gradients_at_steps=(1, 3)),
        )
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
        kept = ["exchange-step-00000005", "latest", "step-00000004", "step-00000005"]
        assert runs.names(rundir.path / "checkpoints") == kept
        assert (rundir.path / "checkpoints" / "latest").read_text() == "step-00000005\n"
        assert ExchangeCheckpoint(rundir.path / "checkpoints" / "exchange-step-00000005").counters.tokens_seen == 5 * 64
        written = json.loads((rundir.path / "summary.json").read_text())
        assert written == dataclasses.asdict(summary)
        assert (written["loss"], written["validation_loss"]) == (rows[-1]["loss"], rows[-1]["validation_loss"])
        assert written["exchange_checkpoint"] == "checkpoints/exchange-step-00000005"
        printed = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
        assert printed[:-1] == ["step 2/5", "step 4/5", "step 5/5"]
        assert printed[-1].startswith("measured: step ")

    def test_the_summary_has_the_validation_of_the_last_step(self, tmp_path, whole):
        """Also where a run is stopped between two of those that are logged; none without held-out data."""
        found = []
        for every, data in ((1, whole.run.data), (2, whole.run.data), (2, DataSpec(train=whole.run.data.train))):
            rundir = runs.prepare(tmp_path / str(len(found)), data=data, validation_every_steps=every)
            summary = runs.run(rundir, stop_at_step=3, export_at_end=False)
            found.append((summary.validation_loss, runs.metrics(rundir)[2]["validation_loss"]))
        last = found[0][1]
        assert found == [(last, last), (last, None), (None, None)]
        assert last > 0

    def test_steps_from_the_token_budget(self, tmp_path):
        plan = tiny.plan(job={"total_tokens": 64 * 3 + 63})
        rundir = runs.trained(tmp_path / "run", plan, steps=None)
        assert length(plan, rundir.run) == (3, 6)
        assert [row["step"] for row in runs.steps(rundir)] == [1, 2, 3]


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
    ours, theirs = (ExchangeCheckpoint(r.path / "checkpoints" / "exchange-step-00000006") for r in (rundir, whole))
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        ours_source, theirs_source = ours.source(kind), theirs.source(kind)
        assert all(torch.equal(ours_source.read(name), theirs_source.read(name)) for name in ours_source.names())


@one_process
class TestInterrupted:
    def test_stopped_and_resumed(self, whole, tmp_path, capsys):
        rundir = runs.prepare(tmp_path / "run")
        for stop, says in ((3, "starting at step 1"), (6, "resumed after step 3\nstep 4/6")):
            assert runs.run(rundir, resume="auto", stop_at_step=stop).step == stop
            assert says in capsys.readouterr().out
        same_end(whole, rundir)

    def test_from_a_path(self, whole, stopped, tmp_path):
        """Of an exchange checkpoint, and of the run that has it, from another run; of its own newest checkpoint."""
        first, before = stopped.path, runs.metrics(stopped)
        other, another = (runs.prepare(tmp_path / name, seed=99) for name in ("exchange", "run"))
        for rundir, place in (
            (other, first / "checkpoints" / "exchange-step-00000004"),
            (another, first),
            (stopped, first / "checkpoints" / "step-00000004"),
        ):
            runs.run(rundir, resume=place)
            assert before + runs.metrics(rundir)[-2:] == runs.metrics(whole)
        same_end(whole, stopped)

    def test_an_exchange_checkpoint_goes_on_with_another_batch_size(self, stopped, tmp_path):
        """What it has seen is then not what this run's schedule says of so many steps."""
        second = runs.prepare(tmp_path / "second", tiny.plan(gradient_accumulation_steps=2))
        shutil.copytree(stopped.path / "checkpoints" / "exchange-step-00000004", tmp_path / "copied")
        runs.run(second, resume=tmp_path / "copied", export_at_end=False)
        assert [row["samples_seen"] for row in runs.metrics(second)] == [12, 16]

    def test_a_finished_run_is_left_as_it_is(self, whole):
        exchange = whole.path / "checkpoints" / "exchange-step-00000006" / "exchange.json"
        before = runs.metrics(whole), exchange.stat().st_mtime_ns
        summary = runs.run(whole, resume="auto")
        assert (summary.step, summary.validation_loss) == (6, before[0][-1]["validation_loss"])
        measured = summary.measured_memory_gib, summary.measured_step_time_s, summary.measured_checkpoint_s
        assert measured == (None, None, None), "this process made no step"
        for resume, said in (
            (None, "continue it with --resume auto"),
            (whole.path / "checkpoints" / "step-00000004", "is of step 4 and this run has a checkpoint of step 6"),
            (whole.path / "gone", "is not a checkpoint"),
        ):
            with pytest.raises(CheckpointError, match=said):
                runs.run(whole, resume=resume)
        assert (runs.metrics(whole), exchange.stat().st_mtime_ns) == before


DAMAGE = {
    "truncated": ("state/master-rank00000-00001.safetensors", lambda content: content[:-1]),
    "corrupted": ("state/master-rank00000-00001.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
    "file missing": ("state/master-rank00000-00001.safetensors", None),
    "no manifest": ("manifest.json", None),
    "manifest damaged": ("manifest.json", lambda content: b'{"format": "kit-na'),
}


@one_process
class TestDamagedCheckpoints:
    def damage(self, rundir, step, how):
        name, change = DAMAGE[how]
        path = rundir.path / "checkpoints" / f"step-{step:08d}" / name
        content = path.read_bytes()
        path.unlink()
        if change is not None:
            path.write_bytes(change(content))

    @pytest.mark.parametrize("how", DAMAGE)
    def test_the_one_before_is_used(self, whole, stopped, how, capsys):
        self.damage(stopped, 4, how)
        runs.run(stopped, resume="auto")
        printed = capsys.readouterr().out
        assert "checkpoint step-00000004 is not usable" in printed
        assert "trying the one before it\nresumed after step 2" in printed
        assert runs.metrics(stopped) == runs.metrics(whole)
        assert "step-00000004.damaged" in runs.names(stopped.path / "checkpoints")

    def test_one_that_was_named_is_refused_and_so_is_a_run_without_a_good_one(self, stopped):
        self.damage(stopped, 4, "corrupted")
        with pytest.raises(CheckpointError, match=r"is corrupted.*use an earlier checkpoint or --resume auto"):
            runs.run(stopped, resume=stopped.path / "checkpoints" / "step-00000004")
        self.damage(stopped, 2, "truncated")
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* is usable \(.*master-rank00000-00001.safetens"):
            runs.run(stopped, resume="auto")

    def test_what_a_kill_during_a_save_leaves_is_ignored(self, stopped):
        checkpoints = stopped.path / "checkpoints"
        shutil.copytree(checkpoints / "step-00000004", checkpoints / ".step-00000006.partial")
        runs.run(stopped, resume="auto")
        exchanged = ["exchange-step-00000004", "exchange-step-00000006"]
        assert runs.names(checkpoints) == [*exchanged, "latest", "step-00000004", "step-00000006"]

    def test_a_full_disk_keeps_the_previous_checkpoint_and_the_run(self, stopped, capsys):
        rundir = runs.with_run(stopped, checkpoint=CheckpointSpec(every_steps=1, keep_last=2))
        before = runs.names(rundir.path / "checkpoints")
        with full_disk(30_000):
            assert runs.run(rundir, resume="auto", export_at_end=False).step == 6
        assert "no checkpoint at step 5, the run goes on: writing the checkpoint" in capsys.readouterr().out
        assert ("checkpoint failed", 5) in [(event["event"], event["step"]) for event in runs.events(rundir)]
        assert runs.names(rundir.path / "checkpoints") == before
        runs.run(rundir, resume="auto")
        assert [row["step"] for row in runs.metrics(rundir)] == [1, 2, 3, 4, 5, 6]


@one_process
class TestRefused:
    def test_without_wrap_an_epoch_is_enough_or_the_run_is_refused(self, whole, tmp_path):
        path = whole.run.data.train
        samples = len(GptSamples(IndexedTokens(path), tiny.SEQ_LENGTH, tiny.VOCAB_SIZE))
        steps = samples // whole.plan.layout.global_batch_size
        once, says = DataSpec(train=path, wrap=False), f"use run.steps={steps}, or wrap=true"
        runs.trained(tmp_path / "enough", data=once, steps=steps, stop_at_step=1)
        with pytest.raises(DataError, match=rf"needs .* samples and .* has {samples:,}.*{says}"):
            runs.trained(tmp_path / "more", data=once, steps=steps + 1)
        assert not (tmp_path / "more" / "metrics.jsonl").exists()


def two_processes(path: Path, dp: int = 2, zero_stage: int = 0):
    spec = tiny.model(ffn_hidden_size=63)  # odd: FSDP2's slices are unequal
    layout = {"micro_batch_size": 2, "gradient_accumulation_steps": 4 // dp, "zero_stage": zero_stage}
    return runs.prepare(path, tiny.plan(spec, dp=dp, **layout))


@pytest.mark.everyday("3")
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_two_processes_are_one_and_a_resumed_run_is_the_same_run(tmp_path, zero_stage):
    """Bit for bit from the own checkpoint, also where one rank's part of the newest is damaged; and by way of the
    exchange checkpoint on one process."""
    (one,) = pool("torch", 1).run(runs.run, two_processes(tmp_path / "one", dp=1))
    whole, stopped = (two_processes(tmp_path / name, zero_stage=zero_stage) for name in ("whole", "stopped"))
    unmeasured = {"measured_step_time_s": None, "measured_checkpoint_s": None}
    two, other = (dataclasses.replace(found, **unmeasured) for found in pool("torch", 2).run(runs.run, whole))
    assert two == other
    assert two.validation_loss == pytest.approx(one.validation_loss, rel=1e-5)
    for ours, theirs in zip(runs.metrics(whole), runs.metrics(two_processes(tmp_path / "one", dp=1)), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["samples_seen"] == theirs["samples_seen"]
    pool("torch", 2).run(runs.run, stopped, 3)
    (message,) = set(pool("torch", 2).run(runs.run_failing, stopped))
    assert "continue it with --resume auto" in message
    shutil.copytree(stopped.path, tmp_path / "damaged")
    damaged = dataclasses.replace(stopped, path=tmp_path / "damaged")
    (damaged.path / "checkpoints" / "step-00000003" / "random" / "rank-00001.json").write_bytes(b"short")
    alone = two_processes(tmp_path / "alone", dp=1)
    pool("torch", 1).run(runs.run, alone, None, stopped.path)
    for ours, theirs in zip(runs.metrics(alone), runs.metrics(whole)[3:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    for rundir in (stopped, damaged):
        pool("torch", 2).run(runs.run, rundir, None, "auto")
        assert runs.metrics(rundir) == runs.metrics(whole)


def unlike_ranks(rundir):
    """Rank 1 waits for the data of step 2, has more memory, and has the weaker reason to stop after step 3."""
    rank, real, agree, found, position_of = dist.get_rank(), DataLoader.step, _Run._agree, [], [0]

    def step(self, position, size=None):
        position_of[0] = position
        time.sleep(0.3 * rank * (position == 4))
        return real(self, position, size)

    def agreed(self, counters):
        found.append(agree(self, counters))
        return found[-1]

    reason = (Reason.SIGTERM, Reason.TIME_LIMIT)[rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataLoader, "step", step)
        patch.setattr(_Run, "_agree", agreed)
        patch.setattr("kit.training.loop.peak_gib", lambda plan: 2.5 + rank)
        patch.setattr(Stopping, "mine", lambda self: reason if position_of[0] == 8 else Reason.NONE)
        patch.setattr(TorchEngine, "held_bytes", lambda self: {"weights": (1 + rank) * 2**30, "gradients": 2**29})
        return runs.run_any(rundir), [each.memory_gib for each in found]


def test_what_is_logged_is_of_all_ranks(tmp_path):
    rundir = runs.prepare(tmp_path / "run", tiny.plan(dp=2))
    for summary, memory in pool("torch", 2).run(unlike_ranks, rundir):
        assert (summary.step, summary.stopped, memory) == (3, "SIGTERM", [3.5] * 3)
        assert (summary.measured_memory_gib, summary.measured_memory_is) == (
            2.5,
            "weights, gradients and optimizer",
        )
        assert summary.tokens_seen == 3 * 4 * tiny.SEQ_LENGTH
    rows = runs.steps(rundir)
    assert [row["data_s"] >= 0.3 for row in rows] == [False, True, False]
    for row in rows:
        assert row["tokens_per_s"] * row["step_time_s"] == pytest.approx(4 * tiny.SEQ_LENGTH)
        assert row["tokens_per_s_per_gpu"] == row["tokens_per_s"] / 2
