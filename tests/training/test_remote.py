"""Checkpoints in object storage: copied behind the run, found again, and what breaks on the way loses nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from kit.errors import KitError, SpecError
from kit.specs.job import OptimizerSpec
from kit.specs.run import CheckpointSpec
from kit.training.checkpoint import uploads
from kit.training.checkpoint.files import FileRecord, record_of, sealed, sealed_files
from kit.training.checkpoint.remote import RemoteCheckpoints, share
from kit.training.checkpoint.upload_process import Upload, Uploader, command
from kit.training.checkpoint.uploads import Uploads
from kit.training.logging.metrics import RunOutput
from tests.support import tiny
from tests.support.alone import process_group_of_one
from tests.support.refusals import refusal
from tests.support.s3 import SECRET
from tests.support.workers import pool
from tests.training import runs

one_process = pytest.mark.usefixtures("one_process")
ADDRESS = "s3://bucket/runs/a"
ACCUMULATED = {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
ADAFACTOR = {"optimizer": OptimizerSpec(name="adafactor")}
EVERY_TWO = {"every_steps": 2, "keep_last": 2}


def to(address, **checkpoint):
    return CheckpointSpec(remote=address, **(EVERY_TWO | checkpoint))


def trained(path, address, plan=None, stop_at_step=None, resume=None, **checkpoint):
    return runs.trained(path, plan, stop_at_step, checkpoint=to(address, **checkpoint), resume=resume)


def files_below(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


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
    manifest(root).write_text(manifest(root).read_text().replace(": 4,", ": 5,"))


def refused(path: Path, address: str, **options) -> str:
    return refusal(KitError, trained, path, address, **options)


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    root = tmp_path_factory.mktemp("stopped")
    with process_group_of_one():
        return trained(root / "run", f"file://{root}/away", stop_at_step=4)


@one_process
class TestARun:
    @pytest.fixture
    def stopped(self, once, tmp_path):
        """A run that has stopped after step 4, and its copy."""
        shutil.copytree(once.path.parent, tmp_path, dirs_exist_ok=True)
        rundir = dataclasses.replace(once, path=tmp_path / "run")
        return runs.with_run(rundir, checkpoint=to(f"file://{tmp_path}/away")), tmp_path / "away"

    def test_copies_what_is_finished_and_keeps_as_many(self, tmp_path):
        rundir = trained(tmp_path / "run", f"file://{tmp_path}/away")
        local = files_below(rundir.path / "checkpoints")
        kept = {"latest", "step-00000004", "step-00000006"}
        assert {name.split("/")[0] for name in local} == kept
        assert files_below(tmp_path / "away") == {"kit": b""} | {n: b for n, b in local.items() if n != "latest"}
        assert not any("after the last step" in each.get("why", "") for each in runs.events(rundir))
        told = [each for each in runs.events(rundir) if each["event"] == "checkpoint uploaded"]
        assert {each["step"] for each in told} <= {2, 4, 6}
        assert [each["step"] for each in told].count(6) == 1
        size = sum(len(content) for name, content in local.items() if name.startswith("step-00000006/model"))
        assert any(each["step"] == 6 and each["bytes"] >= size and each["seconds"] > 0 for each in told)

    @pytest.mark.everyday("True")
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_goes_on_from_s3_on_another_machine(self, tmp_path, s3, whole, asynchronous):
        rundir = trained(tmp_path / "run", ADDRESS, asynchronous=asynchronous, stop_at_step=4)
        assert SECRET.encode() not in b"".join(files_below(rundir.path).values())
        assert RemoteCheckpoints(ADDRESS).steps() == [4, 2]
        lose(rundir)
        runs.resumed(rundir, None)
        assert runs.metrics(rundir) == runs.metrics(whole)[4:]
        assert RemoteCheckpoints(ADDRESS).steps() == [6, 4]

    @pytest.mark.parametrize(
        ("lost", "damage", "says", "step"),
        [
            (True, truncate, "has 100 bytes where", 2),
            (True, misprint, "is damaged", 2),
            (True, lambda root: manifest(root).unlink(), "", 2),  # half-uploaded: it has no manifest
            (False, truncate, "step-00000004 is not usable", 4),  # the copy stands in for it
        ],
    )
    def test_what_is_damaged_gives_way(self, stopped, capsys, lost, damage, says, step):
        """A copy of a run that is lost to the copy before it; a checkpoint to its copy."""
        rundir, away = stopped
        damage(away if lost else rundir.path / "checkpoints")
        if lost:
            lose(rundir)
        runs.resumed(rundir, step)
        said = capsys.readouterr().out
        assert says in said
        assert f"resumed after step {step}" in said
        assert ("step-00000004 in file://" in said) == (lost and says != "")
        assert not lost or runs.names(rundir.path / "checkpoints") == ["step-00000002"]

    def test_a_second_run_needs_a_prefix_of_its_own(self, stopped, tmp_path):
        for resume in (None, stopped[0].path / "checkpoints"):
            said = refused(tmp_path / "second", f"file://{tmp_path}/away", resume=resume)
            assert "checkpoints of an earlier start, up to step 4" in said

    def test_it_comes_back_where_the_plan_has_changed(self, tmp_path, capsys):
        plans = [tiny.plan(job=ADAFACTOR, **each) for each in ({"micro_batch_size": 4}, ACCUMULATED)]
        rundir = trained(tmp_path / "run", f"file://{tmp_path}/away", plans[0], stop_at_step=4)
        lose(rundir)
        runs.resumed(dataclasses.replace(rundir, plan=plans[1]), None)
        assert "step-00000004 was written under another plan" in capsys.readouterr().out
        assert [row["step"] for row in runs.metrics(rundir)] == [5, 6]


@one_process
class TestAServerThatFails:
    @pytest.mark.nightly
    def test_a_run_ends_without_it_and_the_next_start_copies(self, tmp_path, s3, monkeypatch):
        """Which tries again where it fails."""
        monkeypatch.setattr(uploads, "LONGEST_WAIT_S", 3.0)
        s3.fault = lambda method, key: 503 if method == "PUT" and "/step-" in key else None
        rundir = trained(tmp_path / "run", ADDRESS, stop_at_step=4)
        summary = runs.summary(rundir)
        assert (summary.step, summary.unsaved, RemoteCheckpoints(ADDRESS).steps()) == (4, None, [])
        failed = [each["why"] for each in runs.events(rundir) if each["event"] == "checkpoint upload failed"]
        assert any("not done 3 s after the last step" in why for why in failed)
        monkeypatch.undo()
        left = iter(range(12))
        s3.fault = lambda method, key: 503 if method == "PUT" and "/step-" in key and next(left, None) else None
        runs.resumed(runs.with_run(rundir, checkpoint=to(ADDRESS)), 4)
        assert (next(left, None), RemoteCheckpoints(ADDRESS).steps()) == (None, [4, 2])

    @pytest.mark.nightly
    def test_at_the_start(self, tmp_path, s3, capsys, monkeypatch):
        monkeypatch.setattr(uploads, "LONGEST_WAIT_S", 1.0)
        rundir = trained(tmp_path / "run", ADDRESS, stop_at_step=2)
        s3.fault = lambda method, key: 403
        assert "resuming from the local" not in capsys.readouterr().out
        runs.resumed(rundir, 2)
        assert "resuming from the local checkpoints only" in capsys.readouterr().out
        lose(rundir)
        for resume, failed in (("auto", "listing"), (None, "writing")):
            assert f"{failed} s3://bucket/runs/a failed" in runs.run_failing(rundir, resume=resume)

    def test_a_bucket_that_does_not_exist_is_an_error_at_the_start(self, tmp_path, s3):
        assert "writing s3://no-such-bucket/a failed" in refused(tmp_path / "run", "s3://no-such-bucket/a")


@pytest.mark.nightly
def test_a_kill_while_uploading_loses_nothing(tmp_path, saved, s3):
    """The next process copies the rest; before, nobody takes the half for a checkpoint."""
    stuck, release = threading.Event(), threading.Event()

    def fault(method: str, key: str) -> int | None:
        if method == "PUT" and "exp_avg_sq-rank4" in key:
            stuck.set()
            release.wait(60)
            return 503
        return None

    s3.fault = fault
    process = subprocess.Popen(command(upload(saved, ADDRESS)), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert stuck.wait(60)
    process.send_signal(signal.SIGTERM)  # of a job that is stopped: it goes on
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.kill()
    process.communicate()
    release.set()
    remote = RemoteCheckpoints(ADDRESS)
    assert (remote.names(), remote.steps()) == ({"step-00000002"}, [])
    s3.fault = lambda method, key: None
    assert Uploader(upload(saved, ADDRESS)).attempt()
    assert remote.steps() == [2]
    remote.get_files("step-00000002", sealed_files(saved / "step-00000002" / "manifest.json")[1], tmp_path / "back")
    local = files_below(saved / "step-00000002")
    assert files_below(tmp_path / "back") == {name: each for name, each in local.items() if name != "manifest.json"}


def upload(root: Path, address: str, number: int = 0, of: int = 1, last: int = 2) -> Upload:
    return Upload(str(root), address, number, of, last, None)


@pytest.fixture
def saved(tmp_path):
    """A local checkpoint of step 2, of files of other sizes and bytes."""
    directory = tmp_path / "checkpoints" / "step-00000002"
    (directory / "state").mkdir(parents=True)
    for number in range(5):
        (directory / "state" / f"exp_avg_sq-rank{number}").write_bytes(bytes([number]) * (1000 + 100 * number))
    records = {str(p.relative_to(directory)): dataclasses.asdict(record_of(p)) for p in directory.glob("state/*")}
    (directory / "manifest.json").write_text(json.dumps(sealed({"files": records, "step": 2})))
    return directory.parent


class TestHosts:
    @pytest.fixture
    def remote(self, tmp_path):
        return RemoteCheckpoints(f"file://{tmp_path}/away")

    def test_a_copy_is_complete_when_every_host_has_copied(self, tmp_path, saved, remote):
        hosts = [Uploader(upload(saved, remote.address, number, 3)) for number in range(3)]
        assert [hosts[0].attempt(), hosts[1].attempt(), hosts[0].attempt()] == [False, True, False]
        assert remote.steps() == []
        assert [hosts[2].attempt(), remote.steps(), hosts[0].attempt(), remote.steps()] == [True, [], True, [2]]
        assert files_below(tmp_path / "away") == files_below(saved)

    def test_a_word_of_an_earlier_save_does_not_count(self, saved, remote):
        """The run has repeated the step: hosts that copied the old files have not copied the new ones."""
        for number in (1, 0):
            assert Uploader(upload(saved, remote.address, number, 2)).attempt()
        remote.write("step-00000002/uploaded-2-of-2", b"of another manifest")
        path = saved / "step-00000002" / "manifest.json"
        path.write_text(json.dumps(sealed(json.loads(path.read_text()) | {"step": "another"})))
        first, second = (Uploader(upload(saved, remote.address, number, 2)) for number in range(2))
        assert not first.attempt()
        assert remote.steps() == []  # never a checkpoint of two saves
        assert [second.attempt(), first.attempt(), remote.steps()] == [True, True, [2]]

    def test_a_local_file_that_is_damaged_is_never_complete(self, saved, remote, capsys):
        """Told once, until it is another failure."""
        (saved / "step-00000002" / "state" / "exp_avg_sq-rank3").write_bytes(b"\0" * 1300)
        uploader = Uploader(upload(saved, remote.address))
        assert [uploader.attempt(), uploader.attempt(), remote.steps()] == [False, False, []]
        (told,) = map(json.loads, capsys.readouterr().out.splitlines())
        assert "is corrupted" in told.pop("why")
        assert told == {"event": "failed", "name": "step-00000002", "step": 2}

    def test_old_copies_go_when_newer_ones_are_complete(self, saved, remote):
        for step in (4, 6):
            shutil.copytree(saved / "step-00000002", saved / f"step-{step:08d}")
        remote.write("step-00000001/state/a", b"half of one, of a killed run")
        remote.write("step-00000009/state/a", b"half of a newer one, of another host")
        assert Uploader(upload(saved, remote.address, last=2)).attempt()
        assert remote.names() == {f"step-{step:08d}" for step in (4, 6, 9)}

    @pytest.mark.nightly
    def test_two_processes(self, tmp_path):
        """Each rank as on a host of its own; both copy, and both fetch."""
        away = tmp_path / "away"
        rundir = runs.prepare(tmp_path / "run", checkpoint=to(f"file://{away}"))
        assert pool("torch", 2).run(train_on_hosts, rundir, 4) == [4, 4]
        ranks = [name for name in files_below(away / "step-00000004") if name.startswith("random/")]
        assert len(ranks) == 2
        assert not list(away.rglob("uploaded-*"))
        lose(rundir)
        assert pool("torch", 2).run(train_on_hosts, rundir, 6) == [6, 6]
        assert [row["step"] for row in runs.metrics(rundir)] == [5, 6]


def train_on_hosts(rundir, stop: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        two = tiny.plan(dp=2, micro_batch_size=1)
        return runs.run(dataclasses.replace(rundir, plan=two), stop_at_step=stop, resume="auto").step


class Log(RunOutput):
    def __init__(self):
        self.said = []

    def log_event(self, event, step, **values):
        self.said.append((event, step, *values.values()))


@pytest.mark.filterwarnings("error")
def test_a_runs_side_starts_its_process_again_and_says_what_is_not_done(tmp_path, saved, monkeypatch):
    """In the time that it waits at the end, or because the process has died; a next start goes on, a run never ends."""
    given, log = upload(saved, f"file://{tmp_path}/away"), Log()
    with Uploads(given) as side, monkeypatch.context() as patch:
        assert os.getsid(side._process.pid) != os.getsid(0), "signals to the run's group do not reach it"
        patch.setattr(uploads, "LONGEST_WAIT_S", 0.0)
        side.finish(log)
        patch.undo()
        why = "not done 0 s after the last step; the next start goes on copying"
        assert (log.said.pop(), side.newest_step) == (("checkpoint upload failed", 0, why), None)
        side._process.wait()
        side.add("step-00000002")
        side.finish(log)
        ended, (event, step, num_bytes, seconds) = log.said
        assert ended == ("checkpoint upload failed", 0, "the upload process ended (-9); a new one goes on")
        assert (event, step, num_bytes, seconds > 0) == ("checkpoint uploaded", 2, 6000, True)
        assert (side.newest_step, RemoteCheckpoints(given.address).steps()) == (2, [2])
    with Uploads(given) as side:
        side._process.kill()
        side._process.wait()
        side.finish(log)
    why = "the upload process ended (-9); the next start goes on copying"
    assert log.said[2:] == [("checkpoint upload failed", 0, why)]


def test_shares_are_disjoint_cover_all_and_are_even():
    files = {f"state/{n}": FileRecord(bytes=100 + n, xxh3_128="0" * 32) for n in range(10)}
    shares = [share(files, number, 4) for number in range(4)]
    assert sorted(name for each in shares for name in each) == sorted(files)
    loads = [sum(record.bytes for record in each.values()) for each in shares]
    assert max(loads) - min(loads) <= 110


def test_what_is_kept():
    names = {f"step-{n:08d}" for n in (10, 20, 30, 40)}
    assert Upload("", "", 0, 1, 1, 20).kept(names) == {"step-00000020", "step-00000040"}
    assert Upload("", "", 0, 1, 2, None).kept(names) == {"step-00000030", "step-00000040"}


@pytest.mark.parametrize("address", ["s3://key:hunter2@bucket/a", "az://box/a?sig=hunter2", "bucket/a", "s3://"])
def test_addresses_that_are_refused(address):
    assert "hunter2" not in refusal(SpecError, CheckpointSpec, remote=address)


def test_an_unknown_protocol_names_what_to_install():
    assert "deepspeed-megatron-kit[storage]" in refusal(SpecError, lambda: RemoteCheckpoints("nothing://a/b").steps())
