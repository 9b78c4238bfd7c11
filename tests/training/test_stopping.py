"""Signals, the time limit and a hung collective: the run leaves with what it needs to be started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from kit.specs.run import LimitsSpec
from kit.training.stopping import HUNG_CODE, Reason, Stopping, watchdog
from tests.support import tiny
from tests.support.workers import WorkerError, pool
from tests.training import runs

one_process = pytest.mark.usefixtures("one_process")


def events(rundir):
    return [json.loads(line) for line in (rundir.path / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGTERM, Reason.SIGTERM), (signal.SIGUSR1, Reason.SIGUSR1), (signal.SIGINT, Reason.SIGINT)],
)
def test_a_signal_is_remembered_and_its_handler_given_back(number, reason):
    before = signal.getsignal(number)
    with Stopping(None) as stopping:
        assert stopping.mine() is Reason.NONE
        os.kill(os.getpid(), number)
        assert stopping.mine() is reason
        os.kill(os.getpid(), signal.SIGTERM)  # Slurm's, at the end of a warning
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stopping.mine() is max(reason, Reason.SIGTERM)
    assert signal.getsignal(number) is before


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
    assert rank.returncode == 130
    assert said.splitlines()[-1] == "Ctrl-C"
    assert told.count("Ctrl-C again ends at once") == 1
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


@one_process
class TestARunThatIsStopped:
    def test_the_time_limit(self, tmp_path, capsys):
        whole, rundir = (
            runs.prepare(tmp_path / "whole"),
            runs.prepare(tmp_path / "run", limits=LimitsSpec(max_minutes=1)),
        )
        runs.run(whole)
        summary = runs.run(rundir, started=time.monotonic() - 60)
        assert (summary.step, summary.stopped) == (1, "run.limits.max_minutes is over")
        assert (rundir.path / "stopped").read_text() == "run.limits.max_minutes is over\n"
        assert runs.names(rundir.path / "checkpoints") == ["latest", "step-00000001"]
        assert [(event["event"], event["step"]) for event in events(rundir)] == [("stopped", 1)]
        assert "stopping after step 1 with a checkpoint" in capsys.readouterr().out
        summary = runs.run(rundir, resume="auto")
        assert (summary.step, summary.stopped) == (6, None)
        assert not (rundir.path / "stopped").exists()
        assert runs.metrics(rundir) == runs.metrics(whole)

    def test_a_signal_between_two_saves(self, tmp_path, monkeypatch):
        from kit.training.data.loader import DataLoader

        real, calls = DataLoader.step, []

        def step(self, *arguments):
            calls.append(1)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(self, *arguments)

        whole, rundir = runs.prepare(tmp_path / "whole"), runs.prepare(tmp_path / "run")
        runs.run(whole)
        monkeypatch.setattr(DataLoader, "step", step)
        # Ranks exchange their state after backward: the step whose data was being read is the last.
        assert runs.run(rundir).step == 3
        assert runs.run(rundir, resume="auto").step == 6
        assert runs.metrics(rundir) == runs.metrics(whole)


def _signalled(rundir, rank_to_signal):
    """A signal to one rank alone, by a timer that knows nothing of steps."""
    import torch.distributed as dist

    if dist.get_rank() == rank_to_signal:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    return runs.run_any(rundir)


def test_all_ranks_stop_after_the_same_step(tmp_path):
    rundir = runs.prepare(tmp_path / "run", tiny.plan(dp=2), steps=2000)
    one, other = pool("torch", 2).run(_signalled, rundir, 1)
    assert one.step == other.step < 2000
    assert one.stopped == other.stopped == "SIGTERM"
    assert runs.names(rundir.path / "checkpoints")[-1] == f"step-{one.step:08d}"


def _hanging(rundir, directory):
    """Rank 1 stays away from a collective of step 2."""
    import torch.distributed as dist

    from kit.training.data.loader import DataLoader

    real = DataLoader.step

    def step(self, position, size=None):
        if dist.get_rank() == 1 and position:
            _stays_away()
        return real(self, position, size)

    DataLoader.step = step  # this process ends
    return runs.run_any(rundir)


def _stays_away():
    time.sleep(60)


def test_a_hung_collective_is_broken_with_the_stacks_of_all_ranks(tmp_path):
    rundir = runs.prepare(tmp_path / "run", tiny.plan(dp=2), limits=LimitsSpec(hang_seconds=2))
    hung = pool("torch", 2)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="the process died"):
        hung.run(_hanging, rundir, tmp_path, timeout_s=50)
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
        deadline = time.monotonic() + 10
        while not left and time.monotonic() < deadline:
            time.sleep(0.05)
    assert left == [HUNG_CODE]
    assert dog.stacks.read_text().startswith("rank 0 hangs: stuck has taken")


def test_without_a_limit_nothing_is_watched(tmp_path):
    before = threading.active_count()
    with watchdog(None, tmp_path, 0):
        assert threading.active_count() == before
