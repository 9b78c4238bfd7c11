"""A run directory belongs to one run, whose ranks end with their launcher; what could not be saved is said. With real
processes that are really killed."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest

from kit.addons.doctor.logs import diagnose
from kit.errors import RunDirectoryError
from kit.files import locked
from kit.rehearsal.processes import metrics
from kit.training import launcher_watchdog, run_lock
from kit.training.logging.metrics import MetricsLog
from kit.training.run_lock import NAME, _Holder, _Lock
from tests.support.calls import before
from tests.support.files import file_with
from tests.support.refusals import refusal
from tests.support.runs import wait_for_step
from tests.system.kills.cases import CASES, emit
from tests.system.kills.processes import Job
from tests.training import runs

ALL = (0, 1)


def log_of(run):
    return (run / "log.txt").read_text(errors="replace")


_RANK = """
import sys, time
from kit.training.launcher_watchdog import ends_with_launcher
with ends_with_launcher():
    print("here", flush=True)
    time.sleep(float(sys.argv[1]))
print("left alone", flush=True)
"""
_PARENT = "import subprocess, sys; subprocess.run(sys.argv[2:])"


# Launchers in a line: No training here: processes with the names of launchers, and one that stands for a rank.


def start(*names, seconds=30):
    rank = [sys.executable, "-c", _RANK, str(seconds)]
    for name in reversed(names):
        rank = [sys.executable, "-c", _PARENT, name, *rank]
    top = subprocess.Popen(rank, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert top.stdout.readline() == "here\n"
    return top


def test_a_rank_ends_with_the_launcher_of_its_launcher():
    runner = start("deepspeed.launcher.runner", "deepspeed.launcher.launch")
    rank = psutil.Process(runner.pid).children(recursive=True)[-1]
    runner.kill()
    # What can be read ends when the rank has ended.
    assert runner.stdout.read() == f"error: the launcher (process {runner.pid}) is gone: rank 0 stops\n"
    psutil.wait_procs([rank], timeout=5)
    assert not rank.is_running()


@pytest.mark.everyday("a-job-script deepspeed.launcher.launch")
@pytest.mark.parametrize("names", [("a-job-script", "deepspeed.launcher.launch"), ("a-job-script",)], ids=" ".join)
def test_who_started_the_launcher_may_go(names):
    """And a rank without a launcher is left alone."""
    shell = start(*names, seconds=2)
    shell.kill()
    assert shell.stdout.read() == "left alone\n"


DENIED = mock.Mock(side_effect=psutil.AccessDenied)


@pytest.mark.parametrize(
    ("exe", "command", "name"),
    [(lambda: "/usr/bin/python3", [""], None), (DENIED, ["python3", "a.ipynb"], None), (DENIED, [], lambda: "python3")],
)
def test_the_parent_of_a_rank_of_torchrun_is_its_launcher_whatever_its_name(monkeypatch, exe, command, name):
    """A notebook, say, also of another user, whose program is not told. Without torchrun's variables it is nobody's."""
    parents = [
        SimpleNamespace(cmdline=lambda: command, exe=exe, name=name),
        SimpleNamespace(cmdline=lambda: [""], exe=lambda: "/bin/sh", name=None),
    ]
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parents=lambda: parents))
    assert launcher_watchdog._launchers() == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert launcher_watchdog._launchers() == parents[:1]


def test_a_launcher_that_ended_before_its_rank_began():
    command = shlex.join([sys.executable, "-c", _RANK, "2"]) + "; true"  # the shell stands for init
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env={**os.environ, "TORCHELASTIC_RUN_ID": "run"}
    )
    assert "EngineError: the launcher ended before this rank began" in done.stderr
    assert not done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("crashed", [False, True])
def test_of_three_starts_at_once_one_trains(tmp_path, kills_data, crashed):
    """Also where they take over from a run that crashed."""
    run, words = emit(CASES[0], tmp_path / "run", kills_data, 300).path, ()
    if crashed:
        first, words = Job.start(run), ("--resume", "auto")
        wait_for_step((), run, 8, limit_s=60)
        first.kill([*ALL])
        assert json.loads((run / NAME).read_text())["pid"] == first.ranks[0].pid
    jobs = [Job.start(run, *words) for _ in range(3)]
    codes = [job.wait() for job in jobs]
    assert sorted(codes) == [[0, 0], [2, 2], [2, 2]], log_of(run)
    refused = [line for line in log_of(run).splitlines() if line.startswith("error: ")]
    winner = jobs[codes.index([0, 0])].ranks[0].pid
    says = f"is in use: process {winner} on {os.uname().nodename} has trained there since 20"
    assert [(says in line, "--take-over" in line) for line in refused] == [(True, True)] * 2
    assert [row["step"] for row in metrics(run)] == list(range(1, 301))
    assert not (run / NAME).exists()


def held(path, **changes):
    """A lock of another machine, or of what is changed of it."""
    holder = dataclasses.replace(_Holder.here(), **({"host": "node-7", "machine": "another", "pid": 4711} | changes))
    path.write_text(json.dumps(dataclasses.asdict(holder)))
    return holder


def here(**changes):
    """On this machine."""
    mine = _Holder.here()
    return {"host": mine.host, "machine": mine.machine, "pid": mine.pid, **changes}


# A lock of another


@pytest.mark.parametrize(
    ("changes", "quiet_s", "age_s", "replaced"),
    [
        ({}, 119.9, 0.0, False),
        ({}, 120.0, 0.0, True),
        ({}, 14.9, 1e6, False),  # the clocks of two machines may differ: it is watched for a moment
        ({}, 15.0, 119.9, False),
        ({}, 15.0, 120.0, True),
        ({"rendezvous": "run node-1:29400"}, 0.0, 0.0, True),  # torchrun has restarted its workers
        ({"rendezvous": "run node-2:29400"}, 0.0, 0.0, False),
        (here(), 1e6, 1e6, False),  # it lives
        (here(pid=2**22 + 1), 0.0, 0.0, True),  # more than there may be
        (here(process_started="1"), 0.0, 0.0, True),  # a later process of the same id
        (None, 119.9, 1.0, False),  # a process that is just starting
        (None, 120.0, 1.0, True),
    ],
)
def test_is_replaced_if_its_run_is_gone(tmp_path, monkeypatch, changes, quiet_s, age_s, replaced):
    holder = None if changes is None else held(tmp_path / NAME, **changes)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("RDZV_ENDPOINT", "node-1:29400")
    assert _Lock(tmp_path / NAME)._may_replace(holder, quiet_s, age_s) == replaced


@pytest.mark.parametrize(
    ("run", "endpoint", "name"),
    [
        ("run", "node:1", "run node:1"),
        ("run", "", ""),
        ("", "node:1", ""),
        ("0" * 31 + "1", "", "00000000-0000-0000-0000-000000000001"),  # torchrun --standalone
    ],
)
def test_a_rendezvous_has_a_name_if_that_is_unique(monkeypatch, run, endpoint, name):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
    monkeypatch.setenv("RDZV_ENDPOINT", endpoint)
    assert _Holder.here().rendezvous == name


@pytest.mark.parametrize("beats", [False, True])
def test_is_watched_for_its_heartbeat(tmp_path, monkeypatch, beats):
    """Whatever the clocks say; the waiting is shortened."""
    for name, seconds in (("HEARTBEAT_S", 0.1), ("STALE_S", 3.0), ("_WATCH_S", 1.5)):
        monkeypatch.setattr(run_lock, name, seconds)
    held(tmp_path / NAME)
    os.utime(tmp_path / NAME, (1, 1))
    began, beat = time.monotonic(), threading.Timer(0.5, os.utime, (tmp_path / NAME, (2, 2)))
    if beats:
        beat.start()
    with pytest.raises(RunDirectoryError, match="4711 on node-7 has trained") if beats else nullcontext():
        _Lock(tmp_path / NAME).acquire(False)
    assert json.loads((tmp_path / NAME).read_text())["pid"] == (4711 if beats else os.getpid())
    assert beats or 1.5 <= time.monotonic() - began < 3


def test_that_another_start_replaced_meanwhile_is_not_taken(tmp_path):
    """Between reading the old lock and locking it, another start has put its own there, with an equal heartbeat."""
    path = tmp_path / NAME
    for text in ("{}", '{"pid": 1}'):
        os.utime(file_with(path, text), ns=(1, 1))
    assert not _Lock(path)._replace((1, "{}"))
    assert path.read_text() == '{"pid": 1}'


def test_one_of_two_starts_replaces_it_at_a_time(tmp_path):
    """The other finds it taken; what holds it while it is written is gone afterwards."""
    lock = _Lock(tmp_path / NAME)
    (tmp_path / NAME).write_text("{}")
    seen = lock._read()
    with locked(lock._taking):
        assert not lock._replace(seen)
    assert (tmp_path / NAME).read_text() == "{}"
    assert lock._replace(seen)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


# The heart


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """One that is held; what would end the process raises instead."""

    def ends(*arguments):
        raise SystemExit(arguments[-1])

    monkeypatch.setattr(os, "_exit", ends)
    monkeypatch.setattr(os, "kill", ends)
    (tmp_path / "plan.yaml").touch()
    lock = _Lock(tmp_path / NAME)
    lock.acquire(False)
    os.utime(tmp_path / NAME, (1, 1))
    return lock


def test_beats_and_lets_go(lock, tmp_path):
    assert not lock.beat()
    assert (tmp_path / NAME).stat().st_mtime > 1e9
    lock.release()
    assert not (tmp_path / NAME).exists()
    assert not lock.beat()
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid(), "somebody removed the lock alone"


def test_stops_for_another_and_leaves_its_lock(lock, tmp_path, capsys):
    (tmp_path / NAME).write_text("{")  # being written
    assert not lock.beat()
    held(tmp_path / NAME)
    assert refusal(SystemExit, lock.beat) == "2"
    assert f"error: process 4711 on node-7 has taken over {tmp_path}" in capsys.readouterr().err
    lock.release()
    assert json.loads((tmp_path / NAME).read_text())["pid"] == 4711


def test_stops_without_its_directory(lock, tmp_path, capsys):
    shutil.rmtree(tmp_path)
    assert refusal(SystemExit, lock.beat) == str(int(signal.SIGTERM))
    assert f"error: {tmp_path} was deleted or moved while it trains" in capsys.readouterr().err


# What was not saved


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("happens", "unsaved", "printed"),
    [
        (
            "full",
            "lacks 3 of the 6 steps of this run, step 4 to 6: these metrics are lost",
            "metrics of step 4 are",
        ),
        ("replaced", "lacks 6 of the 6 steps of this run (", "where a file is expected"),
        ("taken", "step 6 has no checkpoint of its own: it could not be written, as was said above", ""),
    ],
)
def test_is_said_at_the_end(tmp_path, monkeypatch, capsys, happens, unsaved, printed):
    """A disk that stays full; a directory instead of the metrics; somebody's file where a checkpoint is to be."""
    run = tmp_path / "run"

    def spoil(self, metrics, due=True):
        if metrics.step == 4 and happens == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), self._file.fileno())
        if metrics.step == 4 and happens == "replaced":
            (run / "metrics.jsonl").rename(run / "aside")
            (run / "metrics.jsonl").mkdir()
        if metrics.step == 6 and happens == "taken":
            (run / "checkpoints" / "step-00000006").touch()

    before(monkeypatch, MetricsLog, "log_step", spoil)
    summary = runs.summary(runs.trained(run))
    assert summary.step == 6
    assert unsaved in summary.unsaved
    assert printed in capsys.readouterr().out + summary.unsaved


# What the doctor says


@pytest.mark.parametrize("named", [".", "log.txt", "metrics.jsonl"])
def test_rows_of_two_runs_are_a_cause_and_those_of_one_are_none(tmp_path, named):
    (tmp_path / "log.txt").write_text("all is well\n")
    for steps, causes in (([5, 6, 7, 9], 0), ([1, 2, 3, 4, 3, 5, 4, 6], 1)):
        (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in steps))
        assert len(found := diagnose([tmp_path / named])) == causes
    assert (found[0].cause, found[0].step, found[0].place) == ("two-runs", 3, f"{tmp_path / 'metrics.jsonl'}:5")
    assert "2 steps stand in metrics.jsonl again, from step 3 on, though 6 were reached" in found[0].meaning
