"""Checkpoints in object storage: copied behind the run, found again, and what breaks on the way loses nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from kit.errors import SpecError
from kit.specs.job import OptimizerSpec
from kit.specs.run import CheckpointSpec
from kit.training.checkpoint.files import FileRecord, sealed, sealed_files
from kit.training.checkpoint.remote import RemoteCheckpoints, kept_names, share
from kit.training.checkpoint.upload_process import FINISH, Upload, Uploader, command
from kit.training.checkpoint.uploads import Uploads
from tests.support import tiny
from tests.support.s3 import SECRET, s3_server
from tests.support.workers import pool
from tests.training import runs

one_process = pytest.mark.usefixtures("one_process")
ADDRESS = "s3://bucket/runs/a"
ACCUMULATED = {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
ONE_LAYOUT = {"optimizer": OptimizerSpec(name="adafactor")}
"""Native checkpoints that fit their own layout alone."""
EVERY_TWO = {"every_steps": 2, "keep_last": 2}


def prepare(path, address, plan=None, **checkpoint):
    spec = CheckpointSpec(remote=address, **(EVERY_TWO | {"remote_wait_seconds": 60.0} | checkpoint))
    return runs.prepare(path, plan, checkpoint=spec)


def files_below(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def events(rundir) -> list[dict]:
    return [json.loads(line) for line in (rundir.path / "events.jsonl").read_text().splitlines()]


def lose(rundir) -> None:
    """The machine is gone: nothing of the run's own is left."""
    shutil.rmtree(rundir.path)
    rundir.path.mkdir()


@pytest.fixture
def s3():
    with s3_server("bucket") as server:
        yield server


@one_process
class TestARun:
    def test_copies_what_is_finished_and_keeps_as_many(self, tmp_path):
        rundir = prepare(tmp_path / "run", f"file://{tmp_path}/away")
        runs.run(rundir)
        local = files_below(rundir.path / "checkpoints")
        assert {name.split("/")[0] for name in local} == {
            "latest",
            "step-00000004",
            "step-00000006",
            "exchange-step-00000006",
        }
        assert files_below(tmp_path / "away") == {"kit": b""} | {n: b for n, b in local.items() if n != "latest"}
        assert not any("remote_wait_seconds" in each.get("why", "") for each in events(rundir))
        told = [each for each in events(rundir) if each["event"] == "checkpoint uploaded"]
        assert {each["step"] for each in told} <= {2, 4, 6}
        assert [each["step"] for each in told].count(6) == 2
        size = sum(len(content) for name, content in local.items() if name.startswith("step-00000006/state"))
        assert any(each["step"] == 6 and each["bytes"] >= size and each["seconds"] > 0 for each in told)

    @pytest.mark.everyday("False")
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_goes_on_from_s3_on_another_machine(self, tmp_path, s3, asynchronous):
        whole = runs.prepare(tmp_path / "whole")
        runs.run(whole, export_at_end=False)
        rundir = prepare(tmp_path / "run", ADDRESS, asynchronous=asynchronous)
        runs.run(rundir, stop_at_step=4, export_at_end=False)
        assert SECRET.encode() not in b"".join(files_below(rundir.path).values())
        assert RemoteCheckpoints(ADDRESS).steps() == [4, 2]
        lose(rundir)
        runs.run(rundir, resume="auto", export_at_end=False)
        assert runs.metrics(rundir) == runs.metrics(whole)[4:]
        assert RemoteCheckpoints(ADDRESS).steps() == [6, 4]

    @pytest.mark.nightly
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_tells_its_process_of_every_checkpoint(self, tmp_path, monkeypatch, asynchronous):
        told = []
        monkeypatch.setattr(Uploads, "add", lambda self, name: told.append(name))
        runs.run(prepare(tmp_path / "run", f"file://{tmp_path}/away", asynchronous=asynchronous))
        assert told == [*(f"step-{step:08d}" for step in (2, 4, 6)), "exchange-step-00000006"]

    def test_the_newest_good_one_of_both_places(self, tmp_path, capsys):
        rundir = prepare(tmp_path / "run", f"file://{tmp_path}/away")
        runs.run(rundir, stop_at_step=4, export_at_end=False)
        here, away = rundir.path / "checkpoints", tmp_path / "away"
        file = next(name for name in files_below(here / "step-00000004") if name.startswith("state/"))
        with open(here / "step-00000004" / file, "r+b") as damaged:
            damaged.truncate(100)
        runs.run(rundir, resume="auto", export_at_end=False, stop_at_step=4)  # the local one is damaged, not the remote
        assert "step-00000004 is not usable" in (said := capsys.readouterr().out)
        assert "resumed after step 4" in said

        with open(away / "step-00000004" / file, "r+b") as damaged:
            damaged.truncate(100)
        (away / "step-00000006").mkdir()  # half-uploaded: it has no manifest
        shutil.copytree(here / "step-00000004" / "state", away / "step-00000006" / "state")
        lose(rundir)
        runs.run(rundir, resume="auto", export_at_end=False, stop_at_step=2)
        said = capsys.readouterr().out
        assert "step-00000004 in file://" in said
        assert "has 100 bytes where" in said
        assert "resumed after step 2" in said
        assert runs.names(here) == ["step-00000002"]

    def test_a_damaged_manifest_is_skipped_with_a_word(self, tmp_path, capsys):
        rundir = prepare(tmp_path / "run", f"file://{tmp_path}/away")
        runs.run(rundir, stop_at_step=4, export_at_end=False)
        manifest = tmp_path / "away" / "step-00000004" / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"step": 4', '"step": 5'))
        lose(rundir)
        runs.run(rundir, resume="auto", export_at_end=False, stop_at_step=2)
        assert "manifest.json is damaged" in (said := capsys.readouterr().out)
        assert "resumed after step 2" in said

    def test_a_second_run_needs_a_prefix_of_its_own(self, tmp_path):
        first, second = (prepare(tmp_path / name, f"file://{tmp_path}/away") for name in ("first", "second"))
        runs.run(first, stop_at_step=2, export_at_end=False)
        assert "checkpoints of an earlier start, up to step 2" in runs.run_failing(second)
        assert "checkpoints of an earlier start" in runs.run_failing(second, resume=first.path / "checkpoints")

    def test_an_exchange_checkpoint_comes_back_where_the_plan_has_changed(self, tmp_path, capsys):
        plans = [tiny.plan(job=ONE_LAYOUT, **each) for each in ({"micro_batch_size": 4}, ACCUMULATED)]
        rundir = prepare(tmp_path / "run", f"file://{tmp_path}/away", plan=plans[0])
        runs.run(rundir, stop_at_step=4)
        lose(rundir)
        runs.run(dataclasses.replace(rundir, plan=plans[1]), resume="auto")
        assert "resuming by way of exchange-step-00000004" in capsys.readouterr().out
        assert [row["step"] for row in runs.metrics(rundir)] == [5, 6]


@one_process
class TestAServerThatFails:
    @pytest.mark.nightly
    def test_a_run_ends_without_it_and_the_next_start_copies(self, tmp_path, s3):
        s3.fault = lambda method, key: 503 if method == "PUT" and "/step-" in key else None
        rundir = prepare(tmp_path / "run", ADDRESS, remote_wait_seconds=3.0)
        summary = runs.run(rundir, stop_at_step=4, export_at_end=False)
        assert (summary.step, summary.unsaved) == (4, None)
        assert RemoteCheckpoints(ADDRESS).steps() == []
        failed = [each["why"] for each in events(rundir) if each["event"] == "checkpoint upload failed"]
        assert any("remote_wait_seconds" in why for why in failed)
        s3.fault = lambda method, key: None
        patient = CheckpointSpec(remote=ADDRESS, **EVERY_TWO, remote_wait_seconds=60.0)
        runs.run(runs.with_run(rundir, checkpoint=patient), resume="auto", stop_at_step=4, export_at_end=False)
        assert RemoteCheckpoints(ADDRESS).steps() == [4, 2]

    @pytest.mark.nightly
    def test_a_failure_is_tried_again(self, tmp_path, s3):
        left = [12]

        def fault(method: str, key: str) -> int | None:
            left[0] -= method == "PUT" and "/step-" in key
            return 503 if method == "PUT" and "/step-" in key and left[0] >= 0 else None

        s3.fault = fault
        runs.run(prepare(tmp_path / "run", ADDRESS), stop_at_step=2, export_at_end=False)
        assert left[0] < 0
        assert RemoteCheckpoints(ADDRESS).steps() == [2]

    def test_at_the_start(self, tmp_path, s3, capsys):
        rundir = prepare(tmp_path / "run", ADDRESS)
        runs.run(rundir, stop_at_step=2, export_at_end=False)
        s3.fault = lambda method, key: 403
        assert "resuming from the local" not in capsys.readouterr().out
        runs.run(runs.with_run(rundir, checkpoint=short_wait(rundir)), resume="auto", stop_at_step=2)
        assert "resuming from the local checkpoints only" in capsys.readouterr().out
        lose(rundir)
        assert "listing s3://bucket/runs/a failed" in runs.run_failing(rundir, resume="auto")
        assert "writing s3://bucket/runs/a failed" in runs.run_failing(rundir)

    def test_a_bucket_that_does_not_exist_is_an_error_at_the_start(self, tmp_path, s3):
        said = runs.run_failing(prepare(tmp_path / "run", "s3://no-such-bucket/a"))
        assert "writing s3://no-such-bucket/a failed" in said


def short_wait(rundir) -> CheckpointSpec:
    return CheckpointSpec(remote=rundir.run.checkpoint.remote, **EVERY_TWO, remote_wait_seconds=1.0)


@one_process
def test_a_kill_while_uploading_loses_nothing(tmp_path, s3):
    """The next process copies the rest; before, nobody takes the half for a checkpoint."""
    rundir = runs.prepare(tmp_path / "run")
    runs.run(rundir, stop_at_step=2, export_at_end=False)
    root, stuck = rundir.path / "checkpoints", threading.Event()
    release = threading.Event()

    def fault(method: str, key: str) -> int | None:
        if method == "PUT" and "exp_avg_sq-rank" in key:
            stuck.set()
            release.wait(60)
            return 503
        return None

    s3.fault = fault
    words = command(upload(root, ADDRESS))
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert stuck.wait(60)
    process.send_signal(signal.SIGTERM)  # of a job that is stopped: it goes on
    time.sleep(1)
    assert process.poll() is None
    process.kill()
    process.communicate()
    release.set()
    remote = RemoteCheckpoints(ADDRESS)
    assert (remote.names(), remote.steps()) == ({"step-00000002"}, [])
    s3.fault = lambda method, key: None
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as finishing:
        finishing.stdin.write(FINISH + "\n")
        finishing.stdin.flush()
        assert finishing.wait(60) == 0
    assert remote.steps() == [2]
    remote.get_files("step-00000002", sealed_files(root / "step-00000002" / "manifest.json")[1], tmp_path / "back")
    local = files_below(root / "step-00000002")
    assert files_below(tmp_path / "back") == {name: each for name, each in local.items() if name != "manifest.json"}


def upload(root: Path, address: str, number: int = 0, of: int = 1, last: int = 2) -> Upload:
    return Upload(str(root), address, number, of, {"step": last, "exchange-step": None}, None)


@one_process
class TestHosts:
    @pytest.fixture
    def saved(self, tmp_path):
        rundir = runs.prepare(tmp_path / "run")
        runs.run(rundir, stop_at_step=2, export_at_end=False)
        return rundir.path / "checkpoints"

    def test_a_copy_is_complete_when_every_host_has_copied(self, tmp_path, saved):
        address = f"file://{tmp_path}/away"
        hosts = [Uploader(upload(saved, address, number, 3)) for number in range(3)]
        remote = RemoteCheckpoints(address)
        assert [hosts[0].attempt(), hosts[1].attempt(), hosts[0].attempt()] == [False, True, False]
        assert remote.steps() == []
        assert [hosts[2].attempt(), remote.steps(), hosts[0].attempt(), remote.steps()] == [True, [], True, [2]]
        assert files_below(tmp_path / "away") == {n: b for n, b in files_below(saved).items() if n != "latest"}

    def test_a_word_of_an_earlier_save_does_not_count(self, tmp_path, saved):
        """The run has repeated the step: hosts that copied the old files have not copied the new ones."""
        address = f"file://{tmp_path}/away"
        remote = RemoteCheckpoints(address)
        for number in (1, 0):
            assert Uploader(upload(saved, address, number, 2)).attempt()
        remote.write("step-00000002/uploaded-2-of-2", b"of another manifest")
        manifest = saved / "step-00000002" / "manifest.json"
        other = json.loads(manifest.read_text()) | {"plan_hash": "another"}
        manifest.write_text(json.dumps(sealed(other)))
        first, second = (Uploader(upload(saved, address, number, 2)) for number in range(2))
        assert not first.attempt()
        assert remote.steps() == []  # never a checkpoint of two saves
        assert [second.attempt(), first.attempt(), remote.steps()] == [True, True, [2]]

    def test_a_local_file_that_is_damaged_is_never_complete(self, tmp_path, saved, capsys):
        file = next(path for path in (saved / "step-00000002" / "state").rglob("*") if path.is_file())
        file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
        assert not Uploader(upload(saved, f"file://{tmp_path}/away")).attempt()
        assert "is corrupted" in json.loads(capsys.readouterr().out)["why"]
        assert RemoteCheckpoints(f"file://{tmp_path}/away").steps() == []

    def test_old_copies_go_when_newer_ones_are_complete(self, tmp_path, saved):
        remote = RemoteCheckpoints(f"file://{tmp_path}/away")
        for step in (4, 6):
            shutil.copytree(saved / "step-00000002", saved / f"step-{step:08d}")
        remote.write("step-00000001/state/a", b"half of one, of a killed run")
        assert Uploader(upload(saved, remote.address, last=2)).attempt()
        assert remote.names() == {"step-00000004", "step-00000006"}

    @pytest.mark.nightly
    def test_two_processes(self, tmp_path):
        """Each rank as on a host of its own; both copy, and both fetch."""
        away = tmp_path / "away"
        rundir = prepare(tmp_path / "run", f"file://{away}")
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
        return runs.run_any(dataclasses.replace(rundir, plan=two), stop_at_step=stop, resume="auto").step


def test_shares_are_disjoint_cover_all_and_are_even():
    files = {f"state/{n}": FileRecord(bytes=100 + n, xxh3_128="0" * 32) for n in range(10)}
    shares = [share(files, number, 4) for number in range(4)]
    assert sorted(name for each in shares for name in each) == sorted(files)
    loads = [sum(record.bytes for record in each.values()) for each in shares]
    assert max(loads) - min(loads) <= 110


def test_what_is_kept():
    names = {f"step-{n:08d}" for n in (10, 20, 30, 40)} | {"exchange-step-00000010", "kit"}
    kept = kept_names(names, {"step": 1, "exchange-step": None}, 20)
    assert kept == {"step-00000020", "step-00000040", "exchange-step-00000010"}


@pytest.mark.parametrize("address", ["s3://key:hunter2@bucket/a", "az://box/a?sig=hunter2", "bucket/a", "s3://"])
def test_addresses_that_are_refused(address):
    with pytest.raises(SpecError) as error:
        CheckpointSpec(remote=address)
    assert "hunter2" not in str(error.value)


def test_an_unknown_protocol_names_what_to_install():
    with pytest.raises(SpecError, match="deepspeed-megatron-kit\\[storage\\]"):
        RemoteCheckpoints("nothing://a/b").steps()
