"""Manifests of native and exchange checkpoints: every number in them is protected, and counters agree."""

from __future__ import annotations

import json
import shutil

import pytest

from kit.errors import CheckpointError
from kit.specs.run import BatchRampSpec, CheckpointSpec, ScheduleSpec
from kit.training.checkpoint.counters import Counters
from kit.training.checkpoint.engine_checkpoint import read_manifest
from kit.training.checkpoint.exchange import EXCHANGE_JSON, ExchangeCheckpoint, newest_exchange
from kit.training.checkpoint.files import sealed
from tests.support.alone import process_group_of_one
from tests.training import runs

COUNTERS = ("step", "samples_seen", "tokens_seen", "optimizer_steps", "samples_skipped")
NUMBERS = [-1, -(2**63), 2**63, 10**30, 4.0, 1e308, "4", True, None, [], {}, [4]]
TEXTS = [4, None, [], {}, True]
STEP = "step-00000004"
EXCHANGE = "exchange-step-00000004"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of six steps of two samples, stopped after the fourth, which has both kinds of checkpoint."""
    rundir = runs.prepare(tmp_path_factory.mktemp("stopped") / "run", checkpoint=CheckpointSpec(every_steps=2))
    with process_group_of_one():
        runs.run(rundir, stop_at_step=4)
    return rundir


@pytest.fixture
def run(stopped, tmp_path):
    """A copy to spoil."""
    shutil.copytree(stopped.path, tmp_path / "run")
    shutil.copytree(stopped.path.parent / "data", tmp_path / "data")
    return runs.with_path(stopped, tmp_path / "run")


def change(path, spoil, seal):
    """Changes a manifest, as a person does who knows of the hash (``seal``) or does not."""
    data = json.loads(path.read_text())
    spoil(data)
    path.write_text(json.dumps(sealed(data) if seal else data))


def put(*keys_and_value):
    """A change of one value, by its keys; ``...`` takes the key away."""
    *keys, last, value = keys_and_value

    def spoil(data):
        for key in keys:
            data = data[key]
        if value is ...:
            del data[last]
        else:
            data[last] = value

    return spoil


ABSURD = [
    *((("counters", name), value) for name in COUNTERS for value in [*NUMBERS, ...]),
    *((("world_size",), value) for value in [*NUMBERS, ..., 0]),
    *(((name,), value) for name in ("plan_hash", "model") for value in [*TEXTS, ...]),
    (("plan_hash",), ""),
    *(((name,), value) for name in ("counters", "files") for value in [[], {}, None, 4, "x", ...]),
    *((("version",), value) for value in [-1, 4, 3.0, "3", True, None, ..., 2**70]),
    *((("format",), value) for value in ["kit-exchange", None, 4, [], ...]),
    (("more",), 1),
    (("counters", "more"), 1),
]


class TestNative:
    @pytest.mark.parametrize(("keys", "value"), ABSURD, ids=lambda each: str(each)[:40])
    def test_an_absurd_field_is_refused_though_the_hash_is_right(self, run, keys, value):
        path = run.path / "checkpoints" / STEP / "manifest.json"
        change(path, put(*keys, value), seal=True)
        with pytest.raises(CheckpointError) as error:
            read_manifest(path.parent)
        words = str(error.value)
        assert str(path) in words
        assert "\n" not in words
        assert len(words) < 600

    def test_no_flipped_bit_changes_what_is_read(self, run):
        """A flipped bit in white space may pass. A flipped bit in anything that has a meaning is noticed."""
        path = run.path / "checkpoints" / STEP / "manifest.json"
        content, expected = path.read_bytes(), read_manifest(path.parent)
        noticed = 0
        for place in range(len(content)):
            for bit in range(8):
                path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
                try:
                    assert read_manifest(path.parent) == expected
                except CheckpointError:
                    noticed += 1
        assert noticed > 4 * len(content)

    @pytest.mark.usefixtures("one_process")
    @pytest.mark.parametrize("name", [*COUNTERS, "world_size"])
    def test_one_number_more_is_noticed(self, run, name, capsys):
        """The one before it is taken, and said."""
        path = run.path / "checkpoints" / STEP / "manifest.json"
        keys = (name,) if name == "world_size" else ("counters", name)
        change(
            path, lambda data: put(*keys, (data if len(keys) == 1 else data["counters"])[name] + 1)(data), seal=False
        )
        assert "its own hash (sha256) differs" in runs.run_failing(run, resume=path.parent)
        capsys.readouterr()
        runs.run(run, resume="auto", export_at_end=False)
        assert "checkpoint step-00000004 is not usable" in capsys.readouterr().out

    @pytest.mark.usefixtures("one_process")
    def test_a_version_without_a_hash_is_refused_by_its_name(self, run):
        path = run.path / "checkpoints" / STEP / "manifest.json"

        def older(data):
            data["version"] = 2
            del data["sha256"]

        change(path, older, seal=False)
        for resume in (path.parent, "auto"):
            shutil.rmtree(run.path / "checkpoints" / EXCHANGE, ignore_errors=True)
            words = runs.run_failing(run, resume=resume)
            assert "manifest.json has version 2, this kit reads 3; resume from an exchange checkpoint" in words
        assert path.is_file(), "nothing is wrong with it: it stays"

    @pytest.mark.usefixtures("one_process")
    def test_a_version_without_a_hash_gives_way_to_the_exchange_checkpoint(self, run, capsys):
        change(run.path / "checkpoints" / STEP / "manifest.json", put("version", 2), seal=False)
        runs.run(run, resume="auto")
        assert f"resuming by way of {EXCHANGE}" in capsys.readouterr().out

    @pytest.mark.usefixtures("one_process")
    @pytest.mark.parametrize("name", ["state/more.pt", "more.json", ".hidden", "state/deep/er"])
    def test_a_file_that_is_not_listed_is_refused(self, run, name, tmp_path):
        more = run.path / "checkpoints" / STEP / name
        more.parent.mkdir(exist_ok=True)
        more.write_text("{}")
        for resume in (run.path / "checkpoints" / STEP, "auto"):
            words = runs.run_failing(run, resume=resume)
            assert words.startswith(f"{more} is not in the checkpoint's manifest")
            assert "remove it" in words
        more.unlink()
        (tmp_path / "elsewhere").mkdir()
        more.symlink_to(tmp_path / "elsewhere")  # a directory is none of the files, a link to one is
        assert runs.run_failing(run, resume="auto").startswith(f"{more} is not in the checkpoint's manifest")
        more.unlink()
        runs.run(run, resume="auto")

    @pytest.mark.usefixtures("one_process")
    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (put("files", {}), "should have at least 1 item"),
            (lambda data: [data["files"].pop(n) for n in [*data["files"]] if n[0] == "s"], "lists no file of state/"),
            (lambda data: [data["files"].pop(n) for n in [*data["files"]] if n[0] == "r"], "random/rank-00000.json is"),
            (put("files", "random/rank-00001.json", {"bytes": 1, "xxh3_128": "0" * 32}), "one file for each of 1"),
            (put("files", "state/../../x", {"bytes": 1, "xxh3_128": "0" * 32}), "is outside the checkpoint"),
            (put("files", "state/x", {"bytes": -1, "xxh3_128": "0" * 32}), "x.bytes=-1: should be greater than or"),
            (put("files", "state/x", {"bytes": 1.0, "xxh3_128": "0" * 32}), "x.bytes=1.0: should be a valid integer"),
            (put("files", "state/x", {"bytes": 1, "xxh3_128": "0"}), "String should match pattern"),
            (put("files", "state/x", {"bytes": 1}), "files.state/x.xxh3_128: is required and missing"),
            (lambda data: data.update(plan_hash="f" * 64, model="torch x"), "was written under plan ffffffffffff"),
            (put("world_size", 2), "random/ must have one file for each of 2 ranks"),
        ],
    )
    def test_an_incomplete_manifest_is_no_manifest(self, run, spoil, words):
        path = run.path / "checkpoints" / STEP / "manifest.json"
        change(path, spoil, seal=True)
        assert words in runs.run_failing(run, resume=path.parent)


class TestExchange:
    def test_the_newest_is_that_of_the_highest_step(self, tmp_path):
        """In whatever order the file system lists them, under both names; what has no index is none."""
        steps = {7: "exchange", 30: "hub", 100: "exchange", 20: "exchange", 9: "hub"}
        for step, name in steps.items():
            (tmp_path / f"{name}-step-{step:08d}").mkdir()
            (tmp_path / f"{name}-step-{step:08d}" / f"{name}.json").touch()
        (tmp_path / "exchange-step-00000200").mkdir()
        found = []
        while (newest := newest_exchange(tmp_path)) is not None:
            found.append(int(newest.name[-8:]))
            shutil.rmtree(newest)
        assert found == sorted(steps, reverse=True)

    @pytest.mark.parametrize(
        ("keys", "value"),
        [pair for pair in ABSURD if pair[0][0] in ("counters", "version", "format") and pair[1] != "kit-exchange"],
        ids=lambda each: str(each)[:40],
    )
    def test_an_absurd_field_is_refused_though_the_hash_is_right(self, run, keys, value):
        path = run.path / "checkpoints" / EXCHANGE / EXCHANGE_JSON
        change(path, put(*keys, value), seal=True)
        with pytest.raises(CheckpointError) as error:
            ExchangeCheckpoint(path.parent)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)

    @pytest.mark.usefixtures("one_process")
    @pytest.mark.parametrize("name", COUNTERS)
    def test_one_number_more_is_noticed(self, run, name):
        path = run.path / "checkpoints" / EXCHANGE / EXCHANGE_JSON
        change(path, lambda data: put("counters", name, data["counters"][name] + 1)(data), seal=False)
        assert "its own hash (sha256) differs" in runs.run_failing(run, resume=path.parent)

    @pytest.mark.usefixtures("one_process")
    @pytest.mark.parametrize("version", [2, 3])
    def test_the_names_of_earlier_versions_are_read(self, run, version, capsys):
        """hub-step-…/hub.json; version 2 had no hash of itself, which is said."""
        old = run.path / "checkpoints" / EXCHANGE.replace("exchange", "hub")
        (run.path / "checkpoints" / EXCHANGE).rename(old)
        path = (old / EXCHANGE_JSON).rename(old / "hub.json")
        change(path, put("format", "kit-hub"), seal=True)
        if version == 2:
            change(path, put("version", 2), seal=False)
            with pytest.raises(CheckpointError, match="its own hash"):  # one flipped bit away from 3
                ExchangeCheckpoint(old)
            change(path, put("sha256", ...), seal=False)
        shutil.rmtree(run.path / "checkpoints" / STEP)
        assert newest_exchange(old.parent) == old
        runs.run(run, resume=old, export_at_end=False)
        assert ("is of version 2, whose counters no hash protects" in capsys.readouterr().out) == (version == 2)

    def test_version_2_never_had_the_names_of_today(self, run):
        path = run.path / "checkpoints" / EXCHANGE / EXCHANGE_JSON
        change(path, put("version", 2), seal=True)
        with pytest.raises(CheckpointError, match="has version 2, this kit reads 3"):
            ExchangeCheckpoint(path.parent)

    def test_this_version_without_a_hash_is_damaged(self, run):
        path = run.path / "checkpoints" / EXCHANGE / EXCHANGE_JSON
        change(path, put("sha256", ...), seal=False)
        with pytest.raises(CheckpointError, match="differs or is missing"):
            ExchangeCheckpoint(path.parent)


@pytest.mark.usefixtures("one_process")
class TestCountersAgree:
    """Each with a hash that is right."""

    def resumed(self, run, name, file, *, step=4, samples=8, optimizer_steps=4):
        directory = run.path / "checkpoints" / name

        def spoil(data):
            data["counters"] |= {"step": step, "samples_seen": samples, "optimizer_steps": optimizer_steps}

        change(directory / file, spoil, seal=True)
        return runs.run_failing(run, resume=directory)

    @pytest.mark.parametrize(("name", "file"), [(STEP, "manifest.json"), (EXCHANGE, EXCHANGE_JSON)])
    def test_with_the_metrics(self, run, name, file):
        words = self.resumed(run, name, file, samples=10)
        assert "says samples_seen=10 and" in words
        assert "metrics.jsonl has 8 at step 4" in words

    @pytest.mark.parametrize(("name", "file"), [(STEP, "manifest.json"), (EXCHANGE, EXCHANGE_JSON)])
    def test_with_the_end_of_the_run(self, run, name, file):
        words = self.resumed(run, name, file, step=7, samples=14)
        assert "is of step 7 and this run ends after step 6; resume from an earlier one" in words

    @pytest.mark.parametrize("metrics", [None, "", "\0\xff{", '{"step": 4, "samples_seen": "x"}\n', "[" * 100_000])
    def test_with_the_schedule_where_no_metrics_say_it(self, run, metrics):
        path = run.path / "metrics.jsonl"
        path.unlink()
        if metrics is not None:
            path.write_text(metrics)
        words = self.resumed(run, STEP, "manifest.json", samples=10)
        assert "says samples_seen=10 and the first 4 steps of this run take 8" in words

    @pytest.mark.parametrize("lost", [False, True])
    def test_under_a_batch_ramp(self, tmp_path, lost):
        """Steps of 1, 1, 2 and 2 samples; with and without the metrics."""
        ramp = BatchRampSpec(start=2, increment=2, samples=8)
        schedule = ScheduleSpec(warmup_steps=0, batch_ramp=ramp)
        chosen = runs.tiny.plan(gradient_accumulation_steps=4)
        spec = CheckpointSpec(every_steps=1, keep_last=9)
        rundir = runs.prepare(tmp_path / "run", chosen, schedule=schedule, checkpoint=spec)
        runs.run(rundir, stop_at_step=4, export_at_end=False)
        if lost:
            (rundir.path / "metrics.jsonl").unlink()
        seen = read_manifest(rundir.path / "checkpoints" / STEP).counters.samples_seen
        assert seen < 4 * 8, "the ramp is part of this"
        assert self.resumed(rundir, STEP, "manifest.json", samples=4 * 8)
        change(rundir.path / "checkpoints" / STEP / "manifest.json", put("counters", "samples_seen", seen), seal=True)
        runs.run(rundir, resume="auto", export_at_end=False)

    @pytest.mark.parametrize(
        ("counters", "words"),
        [
            ((4, 8, 256, 5, 0), "optimizer_steps=5 is more than step=4"),
            ((0, 8, 256, 0, 0), "samples_seen=8 at step=0 must be 0"),
            ((4, 3, 256, 4, 0), "samples_seen=3 is less than one in each of step=4"),
            ((4, 8, 7, 4, 0), "tokens_seen=7 is less than samples_seen=8"),
            ((4, 0, 256, 4, 0), "tokens_seen=256 with samples_seen=0 must be 0"),
        ],
    )
    def test_with_each_other(self, counters, words):
        with pytest.raises(ValueError, match=words):
            Counters(*counters)

    @pytest.mark.parametrize("counters", [(4, 8, 256, 4, 0), (4, 8, 256, 0, 9), (9, 0, 0, 9, 0), (0, 0, 0, 0, 0)])
    def test_what_agrees_is_read(self, counters):
        assert Counters(*counters).step == counters[0]
