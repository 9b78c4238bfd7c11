"""Checkpoints in object storage: copied behind the run, found again, and what breaks on the way loses nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from fsspec.implementations.local import LocalFileSystem

from kit.engines.collective import rank
from kit.errors import CheckpointError, KitError, SpecError
from kit.specs.run import CheckpointSpec
from kit.training.checkpoint import uploads
from kit.training.checkpoint.checkpoints import RunCheckpoints
from kit.training.checkpoint.files import FileRecord, checked_files, record_of, with_checksum
from kit.training.checkpoint.remote import RemoteCheckpoints
from kit.training.checkpoint.upload import share
from kit.training.checkpoint.uploads import Uploads
from kit.training.logging.metrics import RunOutput
from tests.support import tiny
from tests.support.files import file_with, files_below, files_in, replace_in
from tests.support.hostile import spoil
from tests.support.refusals import refusal
from tests.support.s3 import SECRET
from tests.support.waiting import comes_true
from tests.support.workers import pool
from tests.training import runs

ADDRESS = "s3://bucket/runs/a"
EVERY_TWO = {"every_steps": 2, "keep_last": 2}


def to(address, **checkpoint):
    return CheckpointSpec(remote=address, **(EVERY_TWO | checkpoint))


def trained(path, address, stop_at_step=None, resume=None, **checkpoint):
    return runs.trained(path, None, stop_at_step, checkpoint=to(address, **checkpoint), resume=resume)


def lose(rundir) -> None:
    """The machine is gone: nothing of the run's own is left."""
    shutil.rmtree(rundir.path)
    rundir.path.mkdir()


def manifest(root: Path) -> Path:
    return root / "step-00000004" / "manifest.json"


def truncate(root: Path) -> None:
    """A file of the state of step 4."""
    with open(next((root / "step-00000004" / "model").glob("*.safetensors")), "r+b") as file:
        file.truncate(100)


def misprint(root: Path) -> None:
    replace_in(manifest(root), ": 4,", ": 5,")


def refused(path: Path, address: str, **options) -> str:
    return refusal(KitError, trained, path, address, **options)


# A run


@pytest.fixture
def copied_run(stopped, tmp_path):
    """``stopped``, and the copy that it would have left (test_copies_what_is_finished_and_keeps_as_many)."""
    away = shutil.copytree(stopped.path / "checkpoints", tmp_path / "away", ignore=shutil.ignore_patterns("latest"))
    (away / "kit").touch()
    return runs.with_run(stopped, checkpoint=to(f"file://{away}")), away


@runs.one_process
def test_copies_what_is_finished_and_keeps_as_many(tmp_path):
    rundir = trained(tmp_path / "run", f"file://{tmp_path}/away")
    local = files_below(rundir.path / "checkpoints")
    assert {name.split("/")[0] for name in local} == {"latest", "step-00000004", "step-00000006"}
    assert files_below(tmp_path / "away") == {"kit": b""} | {n: b for n, b in local.items() if n != "latest"}
    assert not any("after the last step" in each.get("why", "") for each in runs.events(rundir))
    told = [each for each in runs.events(rundir) if each["event"] == "checkpoint uploaded"]
    assert {each["step"] for each in told} <= {2, 4, 6}
    assert [each["step"] for each in told].count(6) == 1
    size = sum(len(content) for name, content in local.items() if name.startswith("step-00000006/model"))
    assert any(each["step"] == 6 and each["bytes"] >= size and each["seconds"] > 0 for each in told)


@runs.one_process
@pytest.mark.everyday("True")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_goes_on_from_s3_on_another_machine(tmp_path, s3, whole, asynchronous):
    rundir = trained(tmp_path / "run", ADDRESS, asynchronous=asynchronous, stop_at_step=4)
    assert SECRET.encode() not in b"".join(files_below(rundir.path).values())
    assert RemoteCheckpoints(ADDRESS).steps() == [4, 2]
    lose(rundir)
    runs.resumed(rundir, None)
    assert runs.metrics(rundir) == runs.metrics(whole)[4:]
    assert RemoteCheckpoints(ADDRESS).steps() == [6, 4]


@runs.one_process
@pytest.mark.parametrize(
    ("lost", "damage", "says", "step"),
    [
        (True, truncate, "has 100 bytes where", 2),
        (True, misprint, "is damaged", 2),
        (True, lambda root: manifest(root).unlink(), "", 2),  # half-uploaded: it has no manifest
        (False, truncate, "step-00000004 is not usable", 4),  # the copy stands in for it
    ],
)
def test_what_is_damaged_gives_way(copied_run, capsys, lost, damage, says, step):
    """A copy of a run that is lost to the copy before it; a checkpoint to its copy."""
    rundir, away = copied_run
    damage(away if lost else rundir.path / "checkpoints")
    if lost:
        lose(rundir)
    runs.resumed(rundir, step)
    said = capsys.readouterr().out
    assert says in said
    assert f"resumed after step {step}" in said
    assert ("step-00000004 in file://" in said) == (lost and says != "")
    assert not lost or runs.names(rundir.path / "checkpoints") == ["step-00000002"]


@runs.one_process
def test_a_second_run_needs_a_prefix_of_its_own(copied_run, tmp_path):
    for resume in (None, copied_run[0].path / "checkpoints"):
        said = refused(tmp_path / "second", f"file://{tmp_path}/away", resume=resume)
        assert "checkpoints of an earlier start, up to step 4" in said


@runs.one_process
def test_it_comes_back_where_the_plan_has_changed(copied_run, capsys):
    rundir, _ = copied_run
    lose(rundir)
    other = tiny.plan(micro_batch_size=1, gradient_accumulation_steps=2)
    runs.resumed(dataclasses.replace(rundir, plan=other), None)
    assert "step-00000004 was written under another plan" in capsys.readouterr().out
    assert [row["step"] for row in runs.metrics(rundir)] == [5, 6]


# A server that fails


@runs.one_process
@pytest.mark.nightly
def test_a_run_ends_without_it_and_the_next_start_copies(tmp_path, s3, monkeypatch):
    """Which tries again where it fails."""
    monkeypatch.setattr(uploads, "LONGEST_WAIT_S", 3.0)
    s3.fault = lambda method, key: 503 if method == "PUT" and "/step-" in key else None
    rundir = trained(tmp_path / "run", ADDRESS, stop_at_step=4)
    summary = runs.summary(rundir)
    assert (summary.step, summary.unsaved, RemoteCheckpoints(ADDRESS).steps()) == (4, None, [])
    failed = [each["why"] for each in runs.events(rundir) if each["event"] == "checkpoint upload failed"]
    assert any("not done 3 s after the last step" in why for why in failed)
    monkeypatch.undo()
    left = iter(range(6))
    s3.fault = lambda method, key: 503 if method == "PUT" and "/step-" in key and next(left, None) else None
    runs.resumed(runs.with_run(rundir, checkpoint=to(ADDRESS)), 4)
    assert (next(left, None), RemoteCheckpoints(ADDRESS).steps()) == (None, [4, 2])


@runs.one_process
@pytest.mark.nightly
def test_a_slow_one_delays_no_step(tmp_path, s3, whole):
    """It answers when training is over; a run that waited for it would never be."""
    metrics, over = tmp_path / "run" / "metrics.jsonl", []

    def fault(method: str, key: str) -> None:
        if method == "PUT" and "/step-" in key:
            over.append(comes_true(lambda: metrics.read_text().count("\n") == 4, 60))

    s3.fault = fault
    rundir = trained(tmp_path / "run", ADDRESS, stop_at_step=4)
    assert {*over} == {True}
    assert runs.metrics(rundir) == runs.metrics(whole)[:4]
    assert RemoteCheckpoints(ADDRESS).steps() == [4, 2]


@runs.one_process
@pytest.mark.nightly
def test_at_the_start(tmp_path, s3, capsys, monkeypatch):
    monkeypatch.setattr(uploads, "LONGEST_WAIT_S", 1.0)
    rundir = trained(tmp_path / "run", ADDRESS, stop_at_step=2)
    s3.fault = lambda method, key: 403
    assert "resuming from the local" not in capsys.readouterr().out
    runs.resumed(rundir, 2)
    assert "resuming from the local checkpoints only" in capsys.readouterr().out
    lose(rundir)
    for resume, failed in (("auto", "listing"), (None, "writing")):
        assert f"{failed} s3://bucket/runs/a failed" in runs.run_failing(rundir, resume=resume)


def test_checkpoints_here_are_candidates_without_the_storage(saved, remote, monkeypatch):
    """The local one before its copy. With nothing here a run would begin again."""
    here, gone = (RunCheckpoints(root, tiny.plan(), 1, remote=remote)._candidates for root in (saved, saved / "gone"))
    assert (copied(saved, remote.address).events(), here(), gone()) == (
        ["checkpoint uploaded"], [(2, False), (2, True)], [(2, True)]
    )  # fmt: skip
    monkeypatch.setattr(RemoteCheckpoints, "steps", Mock(side_effect=CheckpointError("listing failed")))
    assert (here(), refusal(CheckpointError, gone)) == ([(2, False)], "listing failed")


@runs.one_process
def test_a_bucket_that_does_not_exist_is_an_error_at_the_start(tmp_path, s3):
    assert "writing s3://no-such-bucket/a failed" in refused(tmp_path / "run", "s3://no-such-bucket/a")


@pytest.mark.nightly
@pytest.mark.parametrize("end", [lambda process: process.kill(), lambda process: process.stdin.close()])
def test_a_kill_while_uploading_loses_nothing(tmp_path, saved, s3, end):
    """Of the process, or of the run, which closes its input. The next start copies the rest; before, nobody takes the
    half for a checkpoint."""
    stuck, release = threading.Event(), threading.Event()

    def fault(method: str, key: str) -> int | None:
        if method == "PUT" and "exp_avg_sq-rank4" in key:
            stuck.set()
            release.wait(60)
            return 503
        return None

    s3.fault = fault
    command = [sys.executable, "-m", "kit.training.checkpoint.upload", str(saved / STEP), ADDRESS, "0", "1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert stuck.wait(60)
    process.send_signal(signal.SIGTERM)  # of a job that is stopped: it goes on
    refusal(subprocess.TimeoutExpired, process.wait, 1)
    end(process)
    assert process.wait(10) in (-9, 1)
    release.set()
    remote = RemoteCheckpoints(ADDRESS)
    assert ([*remote.listed()], remote.steps()) == ([STEP], [])
    s3.fault = lambda method, key: None
    assert copied(saved, ADDRESS).events() == ["checkpoint uploaded"]
    assert remote.steps() == [2]
    local = files_below(saved / STEP)
    remote.get_files(STEP, local, tmp_path / "back")
    assert files_below(tmp_path / "back") == local


STEP = "step-00000002"


class Log(RunOutput):
    def __init__(self):
        self.said = []

    def log_event(self, event, step, **values):
        self.said.append((event, step, *values.values()))

    def events(self) -> list[str]:
        return [event for event, *_ in self.said]


def copied(root: Path, address: str, **checkpoint) -> Log:
    """What a start of a run copies until its end."""
    log = Log()
    with Uploads(root, to(address, **checkpoint)) as side:
        side.finish(log)
    return log


@pytest.fixture
def saved(tmp_path):
    """A local checkpoint of step 2, of files of other sizes and bytes."""
    directory = tmp_path / "checkpoints" / STEP
    files_in(directory, {f"state/exp_avg_sq-rank{n}": bytes([n]) * (1000 + 100 * n) for n in range(5)})
    records = {str(p.relative_to(directory)): dataclasses.asdict(record_of(p)) for p in directory.glob("state/*")}
    (directory / "manifest.json").write_text(json.dumps(with_checksum({"files": records, "step": 2})))
    return directory.parent


@pytest.fixture
def remote(tmp_path):
    return RemoteCheckpoints(f"file://{tmp_path}/away")


def saved_anew(saved: Path) -> None:
    """The run has repeated the step: a file has other bytes of the same number."""
    record = dataclasses.asdict(record_of(file_with(saved / STEP / "state" / "exp_avg_sq-rank3", b"3" * 1300)))
    spoil(saved / STEP / "manifest.json", ("files", "state/exp_avg_sq-rank3"), record, with_checksum)


# Copies


def test_a_step_that_was_saved_anew_is_copied_anew(tmp_path, saved, remote):
    """Of an earlier save nothing counts, complete or half."""
    for is_half in (False, True):
        assert copied(saved, remote.address).events() == ["checkpoint uploaded"]
        assert files_below(tmp_path / "away") == files_below(saved)
        assert copied(saved, remote.address).said == []
        if is_half:
            remote.remove_file(f"{STEP}/manifest.json")
        saved_anew(saved)
        (saved / STEP / "manifest.json").write_text((saved / STEP / "manifest.json").read_text() + " " * is_half)


def test_what_is_saved_anew_while_it_is_copied_is_not_mixed(tmp_path, saved, remote, monkeypatch):
    real = Uploads._copy_share
    anew = iter([saved_anew])

    def share(self, directory):
        real(self, directory)
        next(anew, lambda _: None)(saved)

    monkeypatch.setattr(Uploads, "_copy_share", share)
    monkeypatch.setattr(uploads, "_FIRST_PAUSE_S", 0.01)
    log = copied(saved, remote.address)
    assert log.said[0][2] == "it was saved anew before its copy was complete"
    assert log.events()[1:] == ["checkpoint uploaded"]
    assert files_below(tmp_path / "away") == files_below(saved)


def test_a_local_file_that_is_damaged_is_never_complete(saved, remote, monkeypatch):
    """Told once, until it is another failure."""
    (saved / STEP / "state" / "exp_avg_sq-rank3").write_bytes(b"\0" * 1300)
    monkeypatch.setattr(uploads, "LONGEST_WAIT_S", 2.0)
    monkeypatch.setattr(uploads, "_FIRST_PAUSE_S", 0.01)
    (event, step, why), (_, _, late) = copied(saved, remote.address).said
    assert (event, step, "is corrupted" in why, remote.steps()) == ("checkpoint upload failed", 2, True, [])
    assert late == "not done 2 s after the last step; the next start goes on copying"


@pytest.mark.parametrize(("keep", "copies"), [({}, [6, 5]), ({"keep_last": 1, "keep_every_steps": 2}, [6, 4, 2])])
def test_the_newest_is_first_and_old_copies_go_when_it_is_complete(saved, remote, keep, copies):
    for step in (4, 5, 6):
        shutil.copytree(saved / STEP, saved / f"step-{step:08d}")
    remote.write("step-00000001/state/a", b"half of one, of a killed run")
    remote.write("step-00000009/state/a", b"half of a newer one, of another run's start")
    assert [step for _, step, *_ in copied(saved, remote.address, **keep).said] == copies
    assert remote.listed().keys() == {f"step-{step:08d}" for step in (*copies, 9)}


def test_a_size_that_differs_there_is_a_failure(tmp_path, saved, remote, monkeypatch):
    monkeypatch.setattr(LocalFileSystem, "put_file", lambda self, path, to, **_: self.pipe_file(to, b"half"))
    files = checked_files(saved / STEP / "manifest.json", STEP)
    assert "rank4 has 4 bytes after its upload, not 1400 bytes" in refusal(
        CheckpointError, remote.put_files, saved / STEP, {"state/exp_avg_sq-rank4": files["state/exp_avg_sq-rank4"]}
    )


def test_a_copy_goes_on_with_what_is_missing(tmp_path, saved, remote):
    files = checked_files(saved / STEP / "manifest.json", STEP)
    remote.put_files(saved / STEP, dict(list(files.items())[:3]))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "away").rglob("*rank*")}
    remote.put_files(saved / STEP, files)
    assert len(before) == 3
    assert before.items() <= {p: p.stat().st_mtime_ns for p in (tmp_path / "away").rglob("*rank*")}.items()
    assert remote.sizes(STEP) == {name: record.bytes for name, record in files.items()}


@pytest.mark.filterwarnings("error")
def test_a_process_that_dies_is_started_again_and_what_is_not_done_is_said(tmp_path, saved, monkeypatch):
    """In the time that a run waits at its end; a next start goes on, a run never ends of it."""
    dies = file_with(
        tmp_path / "dies-once",
        f"#!/bin/sh\nps -o sid= -p $$ >> {tmp_path}/sessions\n"
        f'[ -e {tmp_path}/died ] && exec {sys.executable} "$@"\ntouch {tmp_path}/died; kill -9 $$\n',
    )
    dies.chmod(0o755)
    away = f"file://{tmp_path}/away"
    with monkeypatch.context() as patch:
        patch.setattr(uploads, "LONGEST_WAIT_S", 0.0)
        why = "not done 0 s after the last step; the next start goes on copying"
        assert ("checkpoint upload failed", 0, why) in copied(saved, away).said
        assert RemoteCheckpoints(away).steps() == []
        patch.undo()
        patch.setattr(sys, "executable", str(dies))
        patch.setattr(uploads, "_FIRST_PAUSE_S", 0.01)
        ended, (event, step, num_bytes, seconds) = copied(saved, away).said
    assert ended == ("checkpoint upload failed", 2, "the upload process ended (-9)")
    size = sum(map(len, files_below(saved).values()))
    assert (event, step, num_bytes, seconds > 0) == ("checkpoint uploaded", 2, size, True)
    own = set((tmp_path / "sessions").read_text().split())
    assert str(os.getsid(0)) not in own, "signals to the run's group do not reach it"


# Hosts


@pytest.mark.everyday("1")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_copy_is_complete_when_every_host_has_copied(tmp_path, saved, remote, failing):
    """The process of one host dies at first."""
    first, second = pool("torch", 2).run(copy_on_hosts, saved, remote.address, failing)
    (_, _, why, complete), (event, *_) = first
    assert (why, complete, event) == ("the upload process ended (1)", [], "checkpoint uploaded")
    assert [event for event, *_ in second] == ["checkpoint upload failed"]
    assert files_below(tmp_path / "away") == files_below(saved)


@pytest.mark.nightly
def test_two_processes(tmp_path):
    """Each rank as on a host of its own; both copy, and both fetch."""
    away = tmp_path / "away"
    rundir = runs.prepare(tmp_path / "run", checkpoint=to(f"file://{away}"))
    assert pool("torch", 2).run(train_on_hosts, rundir, 4) == [4, 4]
    assert sum(name.startswith("random/") for name in files_below(away / "step-00000004")) == 2
    lose(rundir)
    assert pool("torch", 2).run(train_on_hosts, rundir, 6) == [6, 6]
    assert [row["step"] for row in runs.metrics(rundir)] == [5, 6]


def copy_on_hosts(root: Path, address: str, failing: int) -> list[tuple]:
    """Each rank as on a host of its own; the first process of rank ``failing`` dies. With a failure: what was complete
    in the storage then."""
    log, python, commands = Log(), sys.executable, []
    real, failed = Uploads._copy_share, Uploads._failed

    def share(self, directory):
        commands.append(directory)
        sys.executable = "/bin/false" if rank() == failing and len(commands) == 1 else python
        try:
            real(self, directory)
        finally:
            sys.executable = python

    def fail(self, name, why):
        failed(self, name, why)
        event, step, values, words = self._reports.get()
        self._reports.put((event, step, values | {"complete": RemoteCheckpoints(address).steps()}, words))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        patch.setattr(uploads, "_FIRST_PAUSE_S", 0.5)
        patch.setattr(Uploads, "_copy_share", share)
        patch.setattr(Uploads, "_failed", fail)
        with Uploads(root, to(address)) as side:
            side.finish(log)
    return log.said


def train_on_hosts(rundir, stop: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        two = tiny.plan(dp=2, micro_batch_size=1)
        return runs.run(dataclasses.replace(rundir, plan=two), stop_at_step=stop, resume="auto").step


def test_shares_are_disjoint_cover_all_and_are_even():
    files = {f"state/{n}": FileRecord(bytes=100 + n, xxh3_128="0" * 32) for n in range(10)}
    shares = [share(files, number, 4) for number in range(4)]
    assert sorted(name for each in shares for name in each) == sorted(files)
    loads = [sum(record.bytes for record in each.values()) for each in shares]
    assert max(loads) - min(loads) <= 110


def test_an_unknown_protocol_names_what_to_install():
    assert "deepspeed-megatron-kit[storage]" in refusal(SpecError, lambda: RemoteCheckpoints("nothing://a/b").steps())
