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
import time
from collections import Counter
from contextlib import suppress

import psutil
import pytest

from kit.diagnose.logs import diagnose
from kit.errors import RunDirectoryError
from kit.rehearsal.processes import metrics
from kit.training import run_lock
from kit.training.logging.metrics import MetricsLog
from kit.training.run_lock import NAME, _Holder, _Lock
from tests.support import runs
from tests.system.kills import launched
from tests.system.kills.cases import CASES, emit, prepare
from tests.system.kills.processes import Job
from tests.training import runs as loop_runs

LONG = 4000
"""Steps of some milliseconds: no test waits for the last one."""
ALL = (0, 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("one-run") / "data")


def log_of(run):
    return (run / "log.txt").read_text(errors="replace")


def wait_for_step(run, step, limit_s=60):
    deadline = time.monotonic() + limit_s
    while not (rows := metrics(run)) or rows[-1]["step"] < step:
        assert time.monotonic() < deadline, log_of(run)
        time.sleep(0.02)


def steps_of(run):
    return [row["step"] for row in metrics(run)]


@pytest.mark.nightly
def test_ranks_end_when_their_launcher_is_killed(tmp_path, data):
    run = emit(CASES[0], tmp_path / "run", data, LONG).path
    torchrun = launched.torchrun(run)
    runs.wait_for_step([torchrun], run, 8, 120)
    ranks = psutil.Process(torchrun.pid).children(recursive=True)
    torchrun.send_signal(signal.SIGKILL)
    try:
        _, left = psutil.wait_procs(ranks, timeout=20)
        assert not left, "orphans"
    finally:
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        torchrun.wait()
    assert f"the launcher (process {torchrun.pid}) is gone" in log_of(run)
    reached = steps_of(run)
    assert reached == list(range(1, len(reached) + 1))
    assert len(reached) < LONG
    assert (run / "checkpoints" / f"step-{reached[-1]:08d}" / "manifest.json").exists(), "it did not save"
    assert not (run / NAME).exists()


_RANK = """
import sys, time
from kit.training.launcher import ends_with_launcher
with ends_with_launcher():
    print("here", flush=True)
    time.sleep(float(sys.argv[1]))
print("left alone", flush=True)
"""
_PARENT = "import subprocess, sys; subprocess.run(sys.argv[2:])"


class TestLaunchersInALine:
    """No training here: processes with the names of launchers, and one that stands for a rank."""

    def start(self, *names, seconds=30):
        rank = [sys.executable, "-c", _RANK, str(seconds)]
        for name in reversed(names):
            rank = [sys.executable, "-c", _PARENT, name, *rank]
        top = subprocess.Popen(rank, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert top.stdout.readline() == "here\n"
        return top

    def test_a_rank_ends_with_the_launcher_of_its_launcher(self):
        runner = self.start("deepspeed.launcher.runner", "deepspeed.launcher.launch")
        rank = psutil.Process(runner.pid).children(recursive=True)[-1]
        runner.kill()
        said = runner.stdout.read()  # ends when the rank has ended
        assert said == f"error: the launcher (process {runner.pid}) is gone: rank 0 stops\n"
        psutil.wait_procs([rank], timeout=5)
        assert not rank.is_running()

    def test_who_started_the_launcher_may_go(self):
        shell = self.start("a-job-script", "deepspeed.launcher.launch", seconds=2)
        shell.kill()
        assert shell.stdout.read() == "left alone\n"

    def test_a_rank_without_a_launcher_is_left_alone(self):
        shell = self.start("a-job-script", seconds=2)
        shell.kill()
        assert shell.stdout.read() == "left alone\n"

    def test_a_launcher_that_ended_before_its_rank_began(self):
        command = shlex.join([sys.executable, "-c", _RANK, "2"]) + "; true"  # the shell stands for init
        environment = {**os.environ, "TORCHELASTIC_RUN_ID": "run"}
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
        assert "EngineError: the launcher ended before this rank began" in done.stderr
        assert not done.stdout


@pytest.mark.nightly
class TestTheLock:
    def test_of_three_starts_at_once_one_trains(self, tmp_path, data):
        run = emit(CASES[0], tmp_path / "run", data, 300).path
        jobs = [Job.start(run) for _ in range(3)]
        codes = [job.wait() for job in jobs]
        assert sorted(codes) == [[0, 0], [2, 2], [2, 2]], log_of(run)
        refused = [line for line in log_of(run).splitlines() if line.startswith("error: ")]
        assert len(refused) == 2
        winner = jobs[codes.index([0, 0])].ranks[0].pid
        for line in refused:
            assert f"is in use: process {winner} on {os.uname().nodename} has trained there since 20" in line
            assert "--take-over" in line
        assert steps_of(run) == list(range(1, 301))
        assert not (run / NAME).exists()

    @pytest.mark.nightly
    def test_a_crashed_run_is_taken_over_at_once_and_a_second_successor_refused(self, tmp_path, data):
        run = emit(CASES[0], tmp_path / "run", data, 200).path
        first = Job.start(run)
        wait_for_step(run, 8)
        first.kill([*ALL])
        assert json.loads((run / NAME).read_text())["pid"] == first.ranks[0].pid
        codes = [job.wait() for job in [Job.start(run, "--resume", "auto") for _ in range(3)]]
        assert sorted(codes) == [[0, 0], [2, 2], [2, 2]], log_of(run)
        assert steps_of(run) == list(range(1, 201))

    def test_a_run_that_is_taken_over_ends_and_the_other_trains(self, tmp_path, data):
        run = emit(CASES[0], tmp_path / "run", data, LONG).path
        first = Job.start(run)
        wait_for_step(run, 8)
        second = Job.start(run, "--resume", "auto", "--take-over")
        for rank in first.ranks:
            rank.join(60)
        assert first.ranks[0].exitcode == 2
        assert not first.alive
        assert f"process {second.ranks[0].pid} on {os.uname().nodename} has taken over" in log_of(run)
        wait_for_step(run, steps_of(run)[-1] + 5)
        second.kill([*ALL])
        assert max(Counter(steps_of(run)).values()) == 1


class TestALockOfAnotherMachine:
    """Heartbeats decide; the file is written here, the waiting is shortened."""

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch):
        for name, seconds in (("HEARTBEAT_S", 0.2), ("STALE_S", 3.0), ("_WATCH_S", 1.5)):
            monkeypatch.setattr(run_lock, name, seconds)

    def other(self, path, **changes):
        holder = dataclasses.replace(
            _Holder.here(), **({"host": "node-7", "machine": "another", "pid": 4711} | changes)
        )
        path.write_text(json.dumps(dataclasses.asdict(holder)))
        return holder

    def test_it_is_taken_over_when_its_heart_has_stopped(self, tmp_path):
        self.other(tmp_path / NAME)
        began = time.monotonic()
        _Lock(tmp_path / NAME).acquire(False)
        assert time.monotonic() - began >= 3
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()

    def test_an_old_one_is_watched_for_a_moment_only(self, tmp_path):
        self.other(tmp_path / NAME)
        os.utime(tmp_path / NAME, (1, 1))
        began = time.monotonic()
        _Lock(tmp_path / NAME).acquire(False)
        assert 1.5 <= time.monotonic() - began < 3

    def test_a_heartbeat_refuses_whatever_the_clocks_say(self, tmp_path):
        import threading

        self.other(tmp_path / NAME)
        os.utime(tmp_path / NAME, (1, 1))
        beat = threading.Timer(0.5, os.utime, (tmp_path / NAME, (2, 2)))
        beat.start()
        with pytest.raises(RunDirectoryError, match="process 4711 on node-7 has trained there since"):
            _Lock(tmp_path / NAME).acquire(False)
        beat.join()

    def test_the_same_rendezvous_takes_over_at_once(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        monkeypatch.setenv("RDZV_ENDPOINT", "node-1:29400")
        self.other(tmp_path / NAME)
        began = time.monotonic()
        _Lock(tmp_path / NAME).acquire(False)
        assert time.monotonic() - began < 1

    def test_a_later_process_of_the_same_id_is_another_one(self, tmp_path):
        mine = _Holder.here()
        self.other(tmp_path / NAME, host=mine.host, machine=mine.machine, pid=os.getppid(), process_started="1")
        _Lock(tmp_path / NAME).acquire(False)
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


class TestWhatWasNotSaved:
    @pytest.mark.everyday("deleted")
    @pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "moved"])
    def test_a_directory_that_goes_while_it_trains(self, tmp_path, data, deleted):
        run = emit(CASES[0], tmp_path / "run", data, LONG).path
        job = Job.start(run)
        wait_for_step(run, 8)
        log = open(run / "log.txt", errors="replace")  # noqa: SIM115  (readable after it is deleted)
        began = time.monotonic()
        run.rename(tmp_path / "moved")
        if deleted:  # in a step: the run would write into what is being removed
            shutil.rmtree(tmp_path / "moved")
        assert job.wait() == [74, 74]
        assert time.monotonic() - began < 60
        said = log.read()
        log.close()
        assert f"{run} was deleted or moved while it trains" in said
        assert f"{run}/metrics.jsonl lacks" in said
        assert list((run / "checkpoints").glob("step-*/manifest.json")), "the state was not saved"

    def test_metrics_whose_file_is_replaced(self, tmp_path, data):
        run = emit(CASES[0], tmp_path / "run", data, 60).path
        job = Job.start(run)
        wait_for_step(run, 8)
        (run / "metrics.jsonl").rename(run / "aside")
        (run / "metrics.jsonl").mkdir()
        assert job.wait() == [74, 74], log_of(run)
        assert "metrics.jsonl lacks 60 of the 60 steps of this run (" in log_of(run)
        assert "where a file is expected)" in log_of(run)
        assert json.loads((run / "summary.json").read_text())["unsaved"].startswith(str(run / "metrics.jsonl"))

    @pytest.mark.usefixtures("one_process")
    def test_metrics_of_a_disk_that_stays_full(self, tmp_path, monkeypatch, capsys):
        real = MetricsLog.log_step

        def log_step(self, metrics, due=True):
            if metrics.step == 4:
                os.dup2(os.open("/dev/full", os.O_WRONLY), self._file.fileno())
            real(self, metrics, due)

        monkeypatch.setattr(MetricsLog, "log_step", log_step)
        rundir = loop_runs.prepare(tmp_path / "run")
        summary = loop_runs.run(rundir)
        assert summary.step == 6
        assert "lacks 3 of the 6 steps of this run, step 4 to 6" in summary.unsaved
        assert "metrics of step 4 are not on disk yet" in capsys.readouterr().out

    @pytest.mark.usefixtures("one_process")
    def test_a_last_checkpoint_that_failed(self, tmp_path, monkeypatch):
        real = MetricsLog.log_step

        def log_step(self, metrics, due=True):
            if metrics.step == 6:  # somebody's file stands where the checkpoint is to be
                (rundir.path / "checkpoints" / "step-00000006").touch()
            real(self, metrics, due)

        monkeypatch.setattr(MetricsLog, "log_step", log_step)
        rundir = loop_runs.prepare(tmp_path / "run")
        assert loop_runs.run(rundir).unsaved == (
            "step 6 has no checkpoint of its own: it could not be written, as was said above"
        )


def test_a_run_that_saved_everything_says_nothing(tmp_path, data):
    run = emit(CASES[0], tmp_path / "run", data, 6).path
    assert Job.start(run).wait() == [0, 0], log_of(run)
    assert json.loads((run / "summary.json").read_text())["unsaved"] is None
    assert not (run / NAME).exists()
    assert "error" not in log_of(run)


class TestWhatTheDoctorSays:
    def write(self, run, steps):
        (run / "log.txt").write_text("all is well\n")
        (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps))

    def test_rows_of_two_runs_are_a_cause(self, tmp_path):
        self.write(tmp_path, [1, 2, 3, 4, 3, 5, 4, 6])
        for named in (tmp_path, tmp_path / "log.txt", tmp_path / "metrics.jsonl"):
            (cause,) = diagnose([named])
            assert (cause.cause, cause.step, cause.place) == ("two-runs", 3, f"{tmp_path / 'metrics.jsonl'}:5")
            assert "2 steps stand in metrics.jsonl again, from step 3 on, though 6 were reached" in cause.meaning

    def test_one_run_is_none(self, tmp_path):
        self.write(tmp_path, [5, 6, 7, 9])
        assert not diagnose([tmp_path])


def test_a_lock_that_another_start_replaced_meanwhile_is_not_taken(tmp_path):
    """Between reading the old lock and locking it, another start has put its own there, with an equal heartbeat."""
    path, other = tmp_path / NAME, tmp_path / "other"
    path.write_text("{}")
    other.write_text("{}")
    with path.open("r+") as old:
        beaten = os.fstat(old.fileno()).st_mtime_ns
        os.utime(other, ns=(beaten, beaten))
        other.replace(path)
        assert not _Lock(path)._replace(old.fileno(), beaten)
    assert path.read_text() == "{}"
