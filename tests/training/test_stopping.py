"""Signals, the time limit and a hung collective: the run leaves with what it needs to be started again."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from kit.emit.run_directory import write
from kit.errors import KitError
from kit.specs.run import LimitsSpec
from kit.training.__main__ import main, process_group
from kit.training.data.loader import DataLoader
from kit.training.stopping import HUNG_CODE, Reason, Stopping, Watchdog, repeatedly, watchdog
from tests.support import tiny
from tests.support.calls import before
from tests.support.refusals import refusal
from tests.support.waiting import comes_true
from tests.support.workers import WorkerError, pool
from tests.training import runs


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGTERM, Reason.SIGTERM), (signal.SIGUSR1, Reason.SIGUSR1), (signal.SIGINT, Reason.SIGINT)],
)
def test_a_signal_is_remembered_and_its_handler_given_back(number, reason, request):
    outside = signal.signal(number, signal.default_int_handler)  # a shell's background processes ignore SIGINT
    request.addfinalizer(lambda: signal.signal(number, outside))
    with Stopping(None) as stopping:
        assert stopping.mine() is Reason.NONE
        os.kill(os.getpid(), number)
        assert stopping.mine() is reason
        os.kill(os.getpid(), signal.SIGTERM)  # Slurm's, at the end of a warning
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stopping.mine() is max(reason, Reason.SIGTERM)
    assert signal.getsignal(number) is signal.default_int_handler


_RANK = """
import time
from kit.training.stopping import Stopping
with Stopping(None) as stopping:
    print("here", flush=True)
    while True:
        time.sleep(0.05)
        print(stopping.mine().words, flush=True)
"""


def test_ctrl_c_that_comes_twice_at_once_counts_once_and_a_later_one_ends_the_process():
    """A terminal and a launcher may both send it."""
    rank = subprocess.Popen(
        [sys.executable, "-c", _RANK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert rank.stdout.readline() == "here\n"
    for _ in range(3):
        rank.send_signal(signal.SIGINT)
        time.sleep(0.05)
    time.sleep(1)
    assert rank.poll() is None
    rank.send_signal(signal.SIGINT)
    said, told = rank.communicate(timeout=10)
    assert (rank.returncode, said.splitlines()[-1], told.count("Ctrl-C again ends at once")) == (130, "Ctrl-C", 1)
    assert "Traceback" not in told


def test_a_run_in_the_background_of_a_script_ignores_ctrl_c():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stopping(None) as stopping:
            os.kill(os.getpid(), signal.SIGINT)
            assert stopping.mine() is Reason.NONE
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_time_limit_counts_from_the_start_of_the_process():
    assert Stopping(1, started=time.monotonic() - 59).mine() is Reason.NONE
    assert Stopping(1, started=time.monotonic() - 61).mine() is Reason.TIME_LIMIT


@runs.one_process
def test_the_time_limit_stops_a_run(tmp_path, capsys):
    rundir = runs.trained(tmp_path / "run", limits=LimitsSpec(max_minutes=1), started=time.monotonic() - 60)
    summary = runs.summary(rundir)
    assert (summary.step, f"{summary.stopped}\n") == (1, (rundir.path / "stopped").read_text())
    assert summary.stopped == "run.limits.max_minutes is over"
    assert runs.names(rundir.path / "checkpoints") == ["latest", "step-00000001"]
    assert [(event["event"], event["step"]) for event in runs.events(rundir)] == [("stopped", 1)]
    assert "stopping after step 1 with a checkpoint" in capsys.readouterr().out
    summary = runs.resumed(rundir, None)
    assert (summary.step, summary.stopped) == (6, None)
    assert not (rundir.path / "stopped").exists()


@pytest.fixture
def worker(whole, tmp_path, monkeypatch, capsys):
    """A function that runs a rank as a launcher would, in this process, and returns its exit code and what it says.
    ``happens`` is called when the data of the third step are read."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)

    def work(*words, happens=None, plan=whole.plan, **run):
        if not (tmp_path / "run").exists():
            write(plan, dataclasses.replace(whole.run, **({"steps": 4} | run)), tmp_path / "run")
        shells = signal.signal(signal.SIGINT, signal.default_int_handler)

        def third_step(self, position, size=None):
            if position == 4 and happens is not None:
                happens(tmp_path / "run")

        with monkeypatch.context() as patch:
            before(patch, DataLoader, "step", third_step)
            code = main([str(tmp_path / "run"), *words])
        signal.signal(signal.SIGINT, shells)  # of a shell's job in the background it is ignored
        assert sys.stdout.line_buffering, "who follows the log sees every line"
        said = capsys.readouterr()
        return code, said.out + said.err

    return work


@pytest.mark.parametrize(
    ("number", "code", "why"),
    [(signal.SIGTERM, 75, "SIGTERM"), (signal.SIGUSR1, 75, "SIGUSR1"), (signal.SIGINT, 130, "Ctrl-C")],
)
def test_a_worker_that_is_stopped_says_how_to_go_on(worker, tmp_path, number, code, why):
    found, said = worker(happens=lambda run: os.kill(os.getpid(), number))
    run = tmp_path / "run"
    assert (found, (run / "stopped").read_text()) == (code, f"{why}\n")
    assert f"saved {run}/checkpoints/step-00000003; to go on:\nkit train {run} --resume auto\n" in said
    assert (run / "checkpoints" / "step-00000003" / "manifest.json").exists()
    assert not (run / "run.lock").exists()
    code, said = worker("--resume", "auto", "--stop-at-step", "4", "--profile", "4")
    assert code == 0
    assert "resumed after step 3\n" in said
    assert "profile of steps 4-4 " in said
    assert not (run / "stopped").exists()


def test_a_worker_counts_its_data_and_tells_cublas_to_repeat(worker, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    code, said = worker(steps=None, plan=tiny.plan(job={"total_tokens": None, "epochs": 0.1}), deterministic=True)
    assert (code, os.environ["CUBLAS_WORKSPACE_CONFIG"]) == (0, ":4096:8")
    assert re.search(r"^\d+ steps: 0\.1\d* epochs of \d+ windows$", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("environment", "words", "happens", "code", "says"),
    [
        ({"WORLD_SIZE": "2"}, (), None, 2, "error: 2 processes were started where the plan has 1; start it with"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, (), None, 2, "error on rank 1: 2 processes were started"),
        ({}, ("--resume", "/nowhere"), None, 2, "error: /nowhere is not a checkpoint"),
        ({}, ("--min-nodes", "2"), None, 2, "error: 2 of 1 nodes: must be from 1 to 1"),
        ({}, (), lambda run: (run / "metrics.jsonl").unlink(), 74, "lacks 4 of the 4 steps of this run"),
    ],
)
def test_a_worker_that_fails_says_why_in_a_line(worker, monkeypatch, environment, words, happens, code, says):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found, said = worker(*words, happens=happens)
    assert (found, says in said, "Traceback" in said) == (code, True, False), said


@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "moved"])
def test_a_directory_that_goes_while_it_trains(worker, tmp_path, monkeypatch, deleted):
    """In a step: the run would write into what is being removed. It saves its state all the same."""
    monkeypatch.setattr("kit.training.run_lock.HEARTBEAT_S", 0.05)

    def goes(run):
        run.rename(tmp_path / "moved")
        if deleted:
            shutil.rmtree(tmp_path / "moved")
        time.sleep(0.5)

    code, said = worker(happens=goes, steps=6)
    run = tmp_path / "run"
    assert code == 74
    assert f"{run} was deleted or moved while it trains" in said
    assert f"{run}/metrics.jsonl lacks 3 of the 3 steps" in said
    assert (run / "checkpoints" / "step-00000003" / "manifest.json").exists(), "the state was not saved"


def test_a_worker_without_its_gpu_says_so(worker):
    gpu = dataclasses.replace(tiny.cluster().gpu, device="cuda", name="H100")
    code, said = worker(plan=dataclasses.replace(tiny.plan(), cluster=dataclasses.replace(tiny.cluster(), gpu=gpu)))
    assert code == 2
    assert "error: the plan is for H100 and torch sees no CUDA device; install torch's CUDA build" in said


@pytest.mark.parametrize(("hang_seconds", "minutes"), [(None, 30), (600, 30), (3600, 70)])
def test_collectives_wait_longer_than_the_watchdog(tmp_path, monkeypatch, hang_seconds, minutes):
    asked = {}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: asked.update(options, backend=backend))
    with process_group(tiny.run_directory(tmp_path / "run", limits=LimitsSpec(hang_seconds=hang_seconds))):
        assert asked == {"backend": "gloo", "timeout": timedelta(minutes=minutes)}


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_names_versions_that_no_test_has_seen(tmp_path, monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.1.0")
    with process_group(tiny.run_directory(tmp_path / "run")):
        said = [line for line in capsys.readouterr().out.splitlines() if "is installed and kit is tested with" in line]
    assert len(said) == (rank == "0")
    assert all(re.match("warning: torch 99.1.0 is .*; pip install 'torch>=2", line) for line in said)


def test_no_rank_starts_with_a_torch_that_is_too_old(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    with (
        pytest.raises(KitError, match=r"torch 1[.]0 is installed"),
        process_group(tiny.run_directory(tmp_path / "run")),
    ):
        pass


def _hanging(rundir, directory):
    """Rank 1 stays away from a collective of step 2."""
    before(pytest.MonkeyPatch(), DataLoader, "step", _stays_away)  # this process ends
    return runs.run(rundir)


def _stays_away(loader, position, size=None):
    time.sleep(60 * dist.get_rank() * (position > 0))


@pytest.mark.nightly
def test_a_hung_collective_is_broken_with_the_stacks_of_all_ranks(tmp_path):
    rundir = runs.prepare(tmp_path / "run", tiny.plan(dp=2), limits=LimitsSpec(hang_seconds=2))
    hung = pool("torch", 2)
    hung.run(os.getpid)  # they have started
    began = time.monotonic()
    assert "the process died" in refusal(WorkerError, hung.run, _hanging, rundir, tmp_path, timeout_s=50)
    assert time.monotonic() - began < 45
    waiting, away = ((rundir.path / "stacks" / f"rank-{rank:05d}.txt").read_text() for rank in (0, 1))
    assert waiting.startswith("rank 0 hangs: step 2 has taken")
    assert away.startswith("rank 1 hangs: step 2 has taken")
    assert "_stays_away" in away
    assert "_stays_away" not in waiting
    assert "forward_backward" in waiting


def test_the_watchdog_barks_once_and_not_at_a_run_that_lives(tmp_path):
    left = []
    with watchdog(0.3, tmp_path, 0, leave=left.append, grace_s=0.01) as dog:
        for _ in range(10):
            dog.beat("working")
            time.sleep(0.05)
        assert not left
        dog.beat("saving", patience=10)
        time.sleep(0.6)
        assert not left
        dog.beat("stuck")
        comes_true(lambda: left, 10)
    assert left == [HUNG_CODE]
    assert dog.stacks.read_text().startswith("rank 0 hangs: stuck has taken")


@runs.one_process
def test_what_takes_long_is_told_to_the_watchdog(tmp_path, monkeypatch):
    """A validation may take many times as long as a step."""
    told = []
    monkeypatch.setattr(Watchdog, "beat", lambda self, doing, patience=1.0: told.append((doing, patience)))
    runs.trained(tmp_path / "run", steps=2, validation_every_steps=1, limits=LimitsSpec(hang_seconds=60))
    assert [doing for doing, patience in told if patience > 1] == [
        "resuming",
        "step 1",
        "validation after step 1",
        "validation after step 2",
        "checkpoint of step 2",
        "finishing",
        "waiting for uploads",
    ]


def test_without_a_limit_nothing_is_watched_and_what_is_done_is_waited_for(tmp_path):
    before, done = threading.active_count(), []
    with watchdog(None, tmp_path, 0):
        assert threading.active_count() == before
    with repeatedly(0.01, lambda: time.sleep(0.2) or bool(done.append(1)), threading.Event()):
        time.sleep(0.1)
    assert (done, threading.active_count()) == ([1], before)
