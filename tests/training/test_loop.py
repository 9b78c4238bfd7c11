"""The loop: what a run leaves behind, and that an interrupted run is the same run."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kit.errors import CheckpointError, DataError, EngineError
from kit.planner.length import length
from kit.specs.job import OptimizerSpec
from kit.specs.run import CheckpointSpec, DataSpec, LoggingSpec
from kit.training.checkpoint.exchange import ExchangeCheckpoint
from kit.training.data.indexed import IndexedTokens
from kit.training.data.samples import GptSamples
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
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
        assert [row["samples_seen"] for row in rows] == [2, 4, 6, 8, 10]
        assert [row["validation_loss"] is None for row in rows] == [True, False, True, False, False]
        assert all(row["tokens"] == 64 for row in rows)
        assert runs.names(rundir.path / "gradients") == ["step-000001.safetensors", "step-000003.safetensors"]
        assert runs.names(rundir.path / "checkpoints") == [
            "exchange-step-00000005",
            "latest",
            "step-00000004",
            "step-00000005",
        ]
        assert (rundir.path / "checkpoints" / "latest").read_text() == "step-00000005\n"
        assert ExchangeCheckpoint(rundir.path / "checkpoints" / "exchange-step-00000005").counters.tokens_seen == 5 * 64
        written = json.loads((rundir.path / "summary.json").read_text())
        assert written == dataclasses.asdict(summary)
        assert (written["loss"], written["validation_loss"]) == (rows[-1]["loss"], rows[-1]["validation_loss"])
        assert written["exchange_checkpoint"] == "checkpoints/exchange-step-00000005"
        printed = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
        assert printed[:-1] == ["step 2/5", "step 4/5", "step 5/5"]
        assert printed[-1].startswith("measured: step ")

    def test_the_summary_has_the_validation_of_the_last_step(self, tmp_path):
        """Also where a run is stopped between two of those that are logged."""
        whole, stopped = (runs.prepare(tmp_path / f"{n}", validation_every_steps=n) for n in (1, 2))
        runs.run(whole, export_at_end=False)
        summary = runs.run(stopped, stop_at_step=3, export_at_end=False)
        assert summary.validation_loss == runs.metrics(whole)[2]["validation_loss"]
        assert runs.metrics(stopped)[2]["validation_loss"] is None

    def test_the_loss_falls(self, tmp_path):
        rundir = runs.prepare(tmp_path / "run", tiny.plan(micro_batch_size=8), steps=40)
        runs.run(rundir)
        losses = [row["loss"] for row in runs.metrics(rundir)]
        assert sum(losses[-5:]) / 5 < losses[0] - 1

    def test_gradients_belong_to_the_logged_norm(self, tmp_path):
        rundir = runs.prepare(tmp_path / "run", steps=1, logging=LoggingSpec(gradients_at_steps=(1,)))
        runs.run(rundir)
        gradients = load_file(rundir.path / "gradients" / "step-000001.safetensors")
        norm = sum(gradient.double().square().sum() for gradient in gradients.values()).sqrt().item()
        assert runs.metrics(rundir)[0]["grad_norm"] == pytest.approx(norm, rel=1e-6)

    def test_steps_from_the_token_budget(self, tmp_path):
        plan = tiny.plan(job={"total_tokens": 64 * 3 + 63})
        rundir = runs.prepare(tmp_path / "run", plan, steps=None)
        assert length(plan, rundir.run) == (3, 6)
        assert runs.run(rundir).step == 3

    def test_without_held_out_data(self, tmp_path):
        rundir = runs.prepare(tmp_path / "run", steps=1)
        rundir = dataclasses.replace(
            rundir, run=dataclasses.replace(rundir.run, data=DataSpec(train=rundir.run.data.train))
        )
        assert runs.run(rundir).validation_loss is None


@one_process
class TestInterrupted:
    @pytest.fixture
    def whole(self, tmp_path):
        """An uninterrupted run of six steps."""
        rundir = runs.prepare(tmp_path / "whole")
        runs.run(rundir)
        return rundir

    def same_end(self, whole, rundir):
        assert runs.metrics(rundir) == runs.metrics(whole)
        ours, theirs = (ExchangeCheckpoint(r.path / "checkpoints" / "exchange-step-00000006") for r in (rundir, whole))
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            ours_source, theirs_source = ours.source(kind), theirs.source(kind)
            assert all(torch.equal(ours_source.read(name), theirs_source.read(name)) for name in ours_source.names())

    def test_stopped_and_resumed(self, whole, tmp_path, capsys):
        rundir = runs.prepare(tmp_path / "run")
        assert runs.run(rundir, stop_at_step=3).step == 3
        capsys.readouterr()
        runs.run(rundir, resume="auto")
        assert capsys.readouterr().out.startswith("resumed after step 3\nstep 4/6")
        self.same_end(whole, rundir)

    def test_killed_and_resumed(self, whole, tmp_path):
        """kill -9 somewhere after step 3 of a process of its own, then resume from the checkpoint of step 2 or 4."""
        rundir = runs.prepare(tmp_path / "run")
        (tmp_path / "rundir.pickle").write_bytes(pickle.dumps(rundir))
        process = subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path / "rundir.pickle")])
        log = rundir.path / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not log.exists() or log.read_text().count("\n") < 3:
            assert process.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.kill()
        process.wait()
        runs.run(rundir, resume="auto")
        self.same_end(whole, rundir)

    def test_resumed_from_an_exchange_checkpoint_in_another_run_directory(self, whole, tmp_path):
        first = runs.prepare(tmp_path / "first")
        runs.run(first, stop_at_step=3)
        second = runs.prepare(tmp_path / "second", seed=99)
        runs.run(second, resume=first.path / "checkpoints" / "exchange-step-00000003")
        assert runs.metrics(first) + runs.metrics(second) == runs.metrics(whole)

    def test_resumed_from_the_path_of_its_newest_checkpoint(self, whole, tmp_path):
        rundir = runs.prepare(tmp_path / "run")
        runs.run(rundir, stop_at_step=3)
        runs.run(rundir, resume=rundir.path / "checkpoints" / "step-00000003")
        self.same_end(whole, rundir)

    def test_an_exchange_checkpoint_goes_on_with_another_batch_size(self, tmp_path):
        """What it has seen is then not what this run's schedule says of so many steps."""
        first = runs.prepare(tmp_path / "first")
        runs.run(first, stop_at_step=3)
        shutil.copytree(first.path / "checkpoints" / "exchange-step-00000003", tmp_path / "copied")
        second = runs.prepare(tmp_path / "second", tiny.plan(gradient_accumulation_steps=2))
        runs.run(second, resume=tmp_path / "copied", export_at_end=False)
        assert [row["samples_seen"] for row in runs.metrics(second)] == [10, 14, 18]

    def test_a_finished_run_is_left_as_it_is(self, whole):
        exchange = whole.path / "checkpoints" / "exchange-step-00000006" / "exchange.json"
        before = runs.metrics(whole), exchange.stat().st_mtime_ns
        summary = runs.run(whole, resume="auto")
        assert summary.step == 6
        assert summary.validation_loss == before[0][-1]["validation_loss"]
        assert (runs.metrics(whole), exchange.stat().st_mtime_ns) == before

    def test_auto_starts_at_the_beginning_of_a_new_run(self, whole, tmp_path):
        rundir = runs.prepare(tmp_path / "run")
        runs.run(rundir, resume="auto")
        self.same_end(whole, rundir)

    def test_a_run_with_a_past_is_not_started_again(self, whole):
        before = runs.metrics(whole)
        with pytest.raises(CheckpointError, match=r"continue it with --resume auto"):
            runs.run(whole)
        assert runs.metrics(whole) == before

    def test_an_older_checkpoint_does_not_overwrite_newer_ones(self, whole):
        with pytest.raises(CheckpointError, match="is of step 4 and this run has a checkpoint of step 6"):
            runs.run(whole, resume=whole.path / "checkpoints" / "step-00000004")

    def test_no_checkpoint_at_the_path(self, whole, tmp_path):
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            runs.run(runs.prepare(tmp_path / "run"), resume=tmp_path)


_KILLED = """
import pickle, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from tests.training import runs
runs.run(pickle.load(open(sys.argv[1], "rb")))
"""


@one_process
class TestDamagedCheckpoints:
    @pytest.fixture
    def stopped(self, tmp_path):
        """A run stopped after step 4, with checkpoints of steps 2 and 4."""
        rundir = runs.prepare(tmp_path / "run")
        runs.run(rundir, stop_at_step=4, export_at_end=False)
        assert runs.names(rundir.path / "checkpoints") == ["latest", "step-00000002", "step-00000004"]
        return rundir

    def damage(self, directory: Path, how: str) -> None:
        state = directory / "state" / "master-rank00000-00001.safetensors"
        match how:
            case "truncated":
                state.write_bytes(state.read_bytes()[:-1])
            case "corrupted":
                content = bytearray(state.read_bytes())
                content[-1] ^= 1
                state.write_bytes(content)
            case "file missing":
                state.unlink()
            case "no manifest":
                (directory / "manifest.json").unlink()
            case "manifest damaged":
                (directory / "manifest.json").write_text('{"format": "kit-na')

    @pytest.mark.parametrize("how", ["truncated", "corrupted", "file missing", "no manifest", "manifest damaged"])
    def test_the_one_before_is_used(self, stopped, tmp_path, how, capsys):
        whole = runs.prepare(tmp_path / "whole")
        runs.run(whole)
        self.damage(stopped.path / "checkpoints" / "step-00000004", how)
        capsys.readouterr()
        runs.run(stopped, resume="auto")
        printed = capsys.readouterr().out
        assert "checkpoint step-00000004 is not usable" in printed
        assert "trying the one before it\nresumed after step 2" in printed
        assert runs.metrics(stopped) == runs.metrics(whole)
        assert "step-00000004.damaged" in runs.names(stopped.path / "checkpoints")

    def test_none_left(self, stopped):
        for step in (2, 4):
            self.damage(stopped.path / "checkpoints" / f"step-{step:08d}", "truncated")
        with pytest.raises(
            CheckpointError, match=r"no checkpoint in .* is usable \(.*master-rank00000-00001.safetensors has"
        ):
            runs.run(stopped, resume="auto")

    def test_a_damaged_one_that_was_named_is_refused(self, stopped):
        self.damage(stopped.path / "checkpoints" / "step-00000004", "corrupted")
        with pytest.raises(CheckpointError, match=r"is corrupted.*use an earlier checkpoint or --resume auto"):
            runs.run(stopped, resume=stopped.path / "checkpoints" / "step-00000004")

    def test_what_a_kill_during_a_save_leaves_is_ignored(self, stopped):
        checkpoints = stopped.path / "checkpoints"
        shutil.copytree(checkpoints / "step-00000004", checkpoints / ".step-00000006.partial")
        runs.run(stopped, resume="auto")
        assert runs.names(checkpoints) == ["exchange-step-00000006", "latest", "step-00000004", "step-00000006"]

    def test_another_plan_is_refused_with_the_way_out(self, tmp_path):
        # Adafactor's factored state fits the layout that wrote the checkpoint alone.
        job = {"optimizer": OptimizerSpec(name="adafactor")}
        stopped = runs.prepare(tmp_path / "run", tiny.plan(job=job, micro_batch_size=2))
        runs.run(stopped, stop_at_step=4, export_at_end=False)
        plan = tiny.plan(job=job, micro_batch_size=1, gradient_accumulation_steps=2)
        other = dataclasses.replace(stopped, plan=plan)
        with pytest.raises(CheckpointError, match=r"was written under plan .* resume from an exchange checkpoint"):
            runs.run(other, resume="auto")

    def test_a_full_disk_keeps_the_previous_checkpoint_and_the_run(self, tmp_path, capsys):
        rundir = runs.prepare(tmp_path / "run", checkpoint=CheckpointSpec(every_steps=1, keep_last=2))
        runs.run(rundir, stop_at_step=1, export_at_end=False)
        capsys.readouterr()
        with full_disk(30_000):
            summary = runs.run(rundir, resume="auto", stop_at_step=3, export_at_end=False)
        assert summary.step == 3
        assert "no checkpoint at step 2, the run goes on: writing the checkpoint" in capsys.readouterr().out
        assert runs.names(rundir.path / "checkpoints") == ["latest", "step-00000001"]
        runs.run(rundir, resume="auto")
        assert [row["step"] for row in runs.metrics(rundir)] == [1, 2, 3, 4, 5, 6]


@one_process
class TestRefused:
    def test_a_loss_that_is_not_finite_names_the_step(self, tmp_path, monkeypatch):
        # No learning rate that a job may have does this in a few steps.
        monkeypatch.setattr("kit.training.loop.learning_rate", lambda *_, **__: 1e30)
        rundir = runs.prepare(tmp_path / "run", tiny.plan(job={"grad_clip": 0.0}))
        with pytest.raises(EngineError, match=r"(loss|gradient norm) is (nan|inf) at step [23]; resume from the last"):
            runs.run(rundir)
        assert not (rundir.path / "summary.json").exists()

    def test_too_little_data(self, tmp_path):
        rundir = runs.prepare(tmp_path / "run", tiny.plan(job={"seq_length": 50_000}))
        with pytest.raises(DataError, match="one sample of seq_length=50000 takes 50001"):
            runs.run(rundir)

    def test_without_wrap_an_epoch_is_enough_or_the_run_is_refused(self, tmp_path):
        whole = runs.prepare(tmp_path / "run", steps=1)
        path = whole.run.data.train
        samples = len(GptSamples(IndexedTokens(path), tiny.SEQ_LENGTH, tiny.VOCAB_SIZE))
        steps = samples // whole.plan.layout.global_batch_size
        once = DataSpec(train=path, wrap=False)
        runs.run(runs.prepare(tmp_path / "enough", data=once, steps=steps), stop_at_step=1, export_at_end=False)
        says = rf"needs .* samples and .* has {samples:,}.*use run.steps={steps}, or wrap=true"
        with pytest.raises(DataError, match=says):
            runs.run(runs.prepare(tmp_path / "more", data=once, steps=steps + 1))
        assert not (tmp_path / "more" / "metrics.jsonl").exists()

    def test_missing_data(self, tmp_path):
        with pytest.raises(DataError, match=r"train\.bin is missing"):
            runs.run(tiny.run_directory(tmp_path / "run"))

    def test_tokens_that_the_model_has_not(self, tmp_path):
        rundir = runs.prepare(tmp_path / "run", tiny.plan(tiny.model(vocab_size=64)))
        with pytest.raises(DataError, match="outside the model's vocabulary of 64"):
            runs.run(rundir)


class TestTwoProcesses:
    def rundir(self, path: Path, dp: int = 2, zero_stage: int = 0):
        spec = tiny.model(ffn_hidden_size=63)  # odd: FSDP2's slices are unequal
        layout = {"micro_batch_size": 2, "gradient_accumulation_steps": 4 // dp, "zero_stage": zero_stage}
        return runs.prepare(path, tiny.plan(spec, dp=dp, **layout))

    @pytest.mark.everyday("0")
    @pytest.mark.parametrize("zero_stage", [0, 2, 3])
    def test_the_curve_is_that_of_one_process_and_resuming_is_bitwise(self, tmp_path, zero_stage):
        (one,) = pool("torch", 1).run(runs.run, self.rundir(tmp_path / "one", dp=1))
        whole, stopped = (self.rundir(tmp_path / name, zero_stage=zero_stage) for name in ("whole", "stopped"))
        two, other = pool("torch", 2).run(runs.run, whole)
        assert dataclasses.replace(two, measured_step_time_s=None, measured_checkpoint_s=None) == dataclasses.replace(
            other, measured_step_time_s=None, measured_checkpoint_s=None
        )
        assert two.validation_loss == pytest.approx(one.validation_loss, rel=1e-5)
        pool("torch", 2).run(runs.run, stopped, timeout_s=60)
        assert runs.metrics(stopped) == runs.metrics(whole), "two runs of the same are bitwise the same"
        again = self.rundir(tmp_path / "again", zero_stage=zero_stage)
        pool("torch", 2).run(_stop_and_resume, again)
        assert runs.metrics(again) == runs.metrics(whole)
        for ours, theirs in zip(runs.metrics(whole), runs.metrics(self.rundir(tmp_path / "one", dp=1)), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["samples_seen"] == theirs["samples_seen"]

    @pytest.mark.parametrize("zero_stage", [0, 3])
    def test_another_world_size_goes_through_the_exchange_checkpoint(self, tmp_path, zero_stage):
        two = self.rundir(tmp_path / "two", zero_stage=zero_stage)
        pool("torch", 2).run(_stop, two)
        (message,) = set(pool("torch", 2).run(runs.run_failing, two))
        assert "continue it with --resume auto" in message
        one = self.rundir(tmp_path / "one", dp=1)
        (summary,) = pool("torch", 1).run(_resume, one, two.path / "checkpoints" / "exchange-step-00000003")
        assert summary.step == 6
        whole = self.rundir(tmp_path / "whole", zero_stage=zero_stage)
        pool("torch", 2).run(runs.run, whole)
        rows = runs.metrics(two) + runs.metrics(one)
        for ours, theirs in zip(rows, runs.metrics(whole), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)

    def test_damage_is_found_by_all_ranks_together(self, tmp_path):
        rundir = self.rundir(tmp_path / "run")
        pool("torch", 2).run(_stop, rundir)
        (rundir.path / "checkpoints" / "step-00000003" / "random" / "rank-00001.json").write_bytes(b"short")
        whole = self.rundir(tmp_path / "whole")
        pool("torch", 2).run(runs.run, whole)
        pool("torch", 2).run(_resume, rundir, "auto")
        assert runs.metrics(rundir) == runs.metrics(whole)


def _stop(rundir):
    return runs.run(rundir, stop_at_step=3)


def _resume(rundir, resume):
    return runs.run(rundir, resume=resume)


def _stop_and_resume(rundir):
    _stop(rundir)
    return _resume(rundir, "auto")
