"""Ctrl-C on a terminal: a real pseudo-terminal, whose foreground processes get the signal, under the real launchers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import psutil
import pytest

from kit.rehearsal import processes
from kit.rehearsal.processes import metrics
from tests.support import runs
from tests.support.refusals import refusal
from tests.support.terminal import OnTerminal, without_moves
from tests.support.waiting import comes_true
from tests.system.kills.cases import BY_NAME, emit

LONG = 4000
"""Steps of some milliseconds: no test waits for the last one."""
LIMIT_S = 120
KIT = (sys.executable, "-m", "kit")


def trained_until_step(run, step, *words):
    job = OnTerminal(*KIT, "train", str(run), *words)
    runs.wait_for_step([job.process], run, step, LIMIT_S)
    return job


def ranks_of(job):
    return [each for each in psutil.Process(job.process.pid).children() if "kit.training" in each.cmdline()]


def interrupted(job):
    """What a job says that Ctrl-C has ended."""
    code, said = job.end()
    assert code == 130, said
    assert "Traceback" not in said
    return without_moves(said)


def check_saved(run, said):
    """The last step that was made has a checkpoint, and the last lines say how to go on from it."""
    last = metrics(run)[-1]["step"]
    assert last < LONG
    saved = run / "checkpoints" / f"step-{last:08d}"
    assert (saved / "manifest.json").exists()
    assert (run / "stopped").read_text() == "Ctrl-C\n"
    assert "Ctrl-C: finishing this step, then a checkpoint; Ctrl-C again ends at once, without" in said
    assert f"saved {saved}; to go on:\nkit train {run} --resume auto\n" in said
    assert not (run / "run.lock").exists()


@pytest.mark.everyday("torch-ddp")
@pytest.mark.parametrize("case", ["torch-ddp", "deepspeed-zero2", "megatron-tp2-sp"])
def test_every_engine_finishes_the_step_and_saves(case, tmp_path, kills_data):
    """torchrun for torch and Megatron, accelerate launch for DeepSpeed; two ranks in sessions of their own."""
    run = emit(BY_NAME[case], tmp_path / "run", kills_data, LONG).path
    job = trained_until_step(run, 4)
    job.press_ctrl_c()
    check_saved(run, interrupted(job))


@pytest.mark.nightly
def test_a_second_ctrl_c_ends_ranks_that_cannot_finish(tmp_path, kills_data, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")  # torchrun's own patience, 30 s
    run = emit(BY_NAME["torch-ddp"], tmp_path / "run", kills_data, LONG).path
    job = trained_until_step(run, 4)
    ranks = ranks_of(job)
    assert len(ranks) == 2
    ranks[1].suspend()  # rank 0 waits for it in a collective
    job.press_ctrl_c()
    time.sleep(3)
    assert job.process.poll() is None, "the first one waits for the ranks"
    job.press_ctrl_c()
    began = time.monotonic()
    interrupted(job)
    assert time.monotonic() - began < 10
    _, left = psutil.wait_procs(ranks, timeout=10)
    assert not left
    assert not (run / "stopped").exists()


@pytest.mark.nightly
def test_before_the_first_step_it_ends_at_once(tmp_path, kills_data):
    run = emit(BY_NAME["torch-ddp"], tmp_path / "run", kills_data, LONG).path
    job = OnTerminal(*KIT, "train", str(run))
    assert comes_true(lambda: ranks_of(job), LIMIT_S)
    time.sleep(0.5)  # Python has begun; the imports take seconds
    job.press_ctrl_c()
    interrupted(job)
    assert not metrics(run)


@pytest.mark.parametrize(
    "wait", [lambda job, place: processes.finish(job, 30), lambda job, place: processes.kill_at(job, place, 1, 30)]
)
def test_whoever_waits_for_a_run_ends_it(wait, tmp_path):
    """Its processes are in a session of their own, which Ctrl-C does not reach."""
    job = processes.start(["sleep", "60"], tmp_path / "log.txt")
    assert os.getsid(job.pid) == job.pid
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        refusal(KeyboardInterrupt, wait, job, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert job.poll() is not None
