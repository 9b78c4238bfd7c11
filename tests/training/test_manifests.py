"""Manifests of native and exchange checkpoints: a change is refused by name or is what is read; counters agree."""

from __future__ import annotations

import dataclasses
import json
import shutil
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import CheckpointError
from kit.specs.run import BatchRampSpec, ScheduleSpec
from kit.training.checkpoint.counters import LARGEST, Counters, RunLength, run_length
from kit.training.checkpoint.engine_checkpoint import read_manifest
from kit.training.checkpoint.exchange import EXCHANGE_JSON, ExchangeCheckpoint, exchange_json, newest_exchange
from kit.training.checkpoint.files import FileRecord, sealed
from tests.support import hostile, tiny
from tests.training.cases import COUNTERS

MANIFEST, SHARD, RECORD = "manifest.json", "master-00001.safetensors", {"bytes": 4, "xxh3_128": "0" * 32}
GOOD: dict[str, dict[str, Any]] = {
    MANIFEST: sealed({
        "format": "kit-native", "version": 3, "plan_hash": "a" * 64, "world_size": 2, "model": "torch x",
        "counters": dataclasses.asdict(COUNTERS),
        "files": {name: {**RECORD} for name in ("state/x", "random/rank-00000.json", "random/rank-00001.json")},
    }),
    EXCHANGE_JSON: exchange_json(COUNTERS, tiny.model(), {"master": {"x": SHARD}}, {SHARD: FileRecord(**RECORD)}),
}  # fmt: skip


def read(path) -> dict[str, Any]:
    """What kit takes from a manifest, counters beside the rest."""
    if path.name == MANIFEST:
        found = dataclasses.asdict(read_manifest(path.parent))
    else:
        exchange = ExchangeCheckpoint(path.parent)
        found = {"counters": dataclasses.asdict(exchange.counters), "optimizer": exchange.optimizer}
    return found.pop("counters") | found


def one_change(name: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """Of anything but the sizes of the model, which tests/specs changes."""
    rest = {key: GOOD[name][key] for key in ("model", "sha256")}
    small = {key: value for key, value in GOOD[name].items() if key not in rest}
    return hostile.mutated(small).map(lambda found: (name, found[1] | rest))


@hostile.fuzz(250)
@given(st.one_of(map(one_change, GOOD)), st.booleans())
def test_one_change_is_refused_by_name_or_is_what_is_read(tmp_path_factory, change, seals):
    """By who knows of the hash, or does not: then nothing is read."""
    name, tree = change
    path = tmp_path_factory.mktemp("changed") / name
    path.write_text(json.dumps(sealed(tree) if seals else tree))
    try:
        found = read(path)
    except CheckpointError as error:
        words = str(error)
        assert (str(path) in words, "\n" in words, len(words) < 700) == (True, False, True)
        return
    assert seals or sealed(tree) == GOOD[name]
    assert tree.keys() <= GOOD[name].keys()
    said = {**tree["counters"], **tree}
    taken = {key: json.dumps(found[key], sort_keys=True) for key in found.keys() & said.keys()}
    assert taken == {key: json.dumps(said[key], sort_keys=True) for key in taken}
    numbers = [found[each.name] for each in dataclasses.fields(Counters)[:5]]
    assert all(type(number) is int and 0 <= number <= LARGEST for number in numbers)
    assert 1 <= found.get("world_size", 1) <= 1 << 24


def test_no_flipped_bit_changes_what_is_read(tmp_path):
    """A flipped bit in white space may pass. A flipped bit in anything that has a meaning is noticed."""
    path, noticed = tmp_path / MANIFEST, 0
    content = json.dumps(GOOD[MANIFEST], indent=1).encode()
    path.write_bytes(content)
    expected = read_manifest(tmp_path)
    for place in range(len(content)):
        for bit in range(place % 4, 8, 4):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            try:
                assert read_manifest(tmp_path) == expected
            except CheckpointError:
                noticed += 1
    assert noticed > len(content)


@pytest.mark.parametrize(
    ("name", "place", "value", "words"),
    [
        (MANIFEST, ("files",), {}, "should have at least 1 item"),
        (MANIFEST, ("files", "state/x"), ..., "lists no file of state/"),
        (MANIFEST, ("files", "random/rank-00000.json"), ..., "one file for each of 2 ranks"),
        (MANIFEST, ("files", "random/rank-00002.json"), RECORD, "one file for each of 2 ranks"),
        (MANIFEST, ("world_size",), 3, "one file for each of 3 ranks"),
        (MANIFEST, ("world_size",), 0, "world_size=0"),
        (MANIFEST, ("world_size",), (1 << 24) + 1, "world_size=16777217"),
        (MANIFEST, ("plan_hash",), "", "plan_hash"),
        (MANIFEST, ("files", "state/../../x"), RECORD, "is outside the checkpoint"),
        (MANIFEST, ("files", "/x"), RECORD, "/x is outside the checkpoint"),
        (MANIFEST, ("files", "state/x", "bytes"), -1, "x.bytes=-1: should be greater than or"),
        (MANIFEST, ("files", "state/x", "bytes"), 1.0, "x.bytes=1.0: should be a valid integer"),
        (MANIFEST, ("files", "state/x", "xxh3_128"), "0", "String should match pattern"),
        (MANIFEST, ("files", "state/x", "xxh3_128"), ..., "files.state/x.xxh3_128: is required and missing"),
        (MANIFEST, ("format",), "kit-exchange", "format is not 'kit-native'"),
        (MANIFEST, ("version",), 2, "has version 2, this kit reads 3; resume from an exchange checkpoint"),
        (EXCHANGE_JSON, ("format",), "other", "format is not 'kit-exchange'"),
        (EXCHANGE_JSON, ("version",), 2, "has version 2, this kit reads 3; export it again"),
        (EXCHANGE_JSON, ("counters",), {"step": 1}, "counters.samples_seen: is required and missing"),
        (EXCHANGE_JSON, ("model",), {"name": "x"}, "exchange.json is damaged"),
        (EXCHANGE_JSON, ("files",), {"a": RECORD}, f"has no hash of {SHARD}"),
        (EXCHANGE_JSON, ("files", "../outside"), RECORD, "is outside the checkpoint"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(tmp_path, name, place, value, words):
    """Though the hash is right. Without one, no manifest of today is read."""
    changed = hostile.changed(GOOD[name], place, value)
    for tree, said in ((sealed(changed), words), (hostile.changed(GOOD[name], ("sha256",), ...), "hash (sha256)")):
        (tmp_path / name).write_text(json.dumps(tree))
        with pytest.raises(CheckpointError) as error:
            read(tmp_path / name)
        assert said in str(error.value)


def test_the_newest_is_that_of_the_highest_step(tmp_path):
    """In whatever order the file system lists them; what has no index is none."""
    steps = (7, 30, 100, 20, 9)
    for step in steps:
        (tmp_path / f"exchange-step-{step:08d}").mkdir()
        (tmp_path / f"exchange-step-{step:08d}" / EXCHANGE_JSON).touch()
    (tmp_path / "exchange-step-00000200").mkdir()
    found = []
    while (newest := newest_exchange(tmp_path)) is not None:
        found.append(int(newest.name[-8:]))
        shutil.rmtree(newest)
    assert found == sorted(steps, reverse=True)


class TestCounters:
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
    def test_agree_with_each_other(self, counters, words):
        with pytest.raises(ValueError, match=words):
            Counters(*counters)

    def test_that_agree_are_read(self):
        found = [Counters(*each) for each in ((4, 4, 4, 4, 0), (4, 8, 256, 0, 9), (9, 0, 0, 9, 0), (0, 0, 0, 0, 0))]
        assert [each.position for each in found] == [4, 17, 0, 0]

    @pytest.mark.parametrize(
        ("step", "samples", "metrics", "same_plan", "words"),
        [
            (6, 12, None, True, None),
            (7, 14, None, True, "is of step 7 and this run ends after step 6; resume from an earlier one"),
            (4, 10, '{"step": 4, "samples_seen": 8}\n', True, "metrics.jsonl has 8 at step 4"),
            # The last row of the step counts: it was repeated. Rows of other steps do not.
            (4, 10, '{"step": 4, "samples_seen": 8}\n{"step": 4, "samples_seen": 10}\n', True, None),
            (4, 10, '{"step": 3, "samples_seen": 8}\n', True, "says samples_seen=10 and the first 4 steps of this run"),
            (4, 10, None, True, "says samples_seen=10 and the first 4 steps of this run take 8"),
            (4, 10, None, False, None),
            *((4, 10, m, True, "take 8") for m in ("", "\0\xff{", '{"step": 4, "samples_seen": "x"}\n', "[" * 100_000)),
        ],
        ids=lambda each: str(each)[:30],
    )  # fmt: skip
    def test_agree_with_the_run(self, tmp_path, step, samples, metrics, same_plan, words):
        """Which ends after six steps of two samples."""
        if metrics is not None:
            (tmp_path / "metrics.jsonl").write_text(metrics)
        length = RunLength(6, lambda steps: 2 * steps)
        counters, checkpoint = Counters(step, samples, samples, step, 0), tmp_path / "checkpoints" / "step-00000004"
        with pytest.raises(CheckpointError, match=words) if words else nullcontext():
            length.check(counters, checkpoint, same_plan)

    def test_of_a_schedule(self):
        """Batches of 8; a ramp over 8 sequences in three steps, of 8 / 3 sequences each: Megatron's rule."""
        plan = tiny.plan(micro_batch_size=2, gradient_accumulation_steps=4)
        ramp = ScheduleSpec(warmup_steps=0, batch_ramp=BatchRampSpec(start=2, increment=2, samples=8))
        for schedule, sizes in ((ScheduleSpec(), [8] * 6), (ramp, [2, 2, 4, 8, 8, 8])):
            length = run_length(plan, tiny.run_directory_spec(steps=6, schedule=schedule))
            assert [length.samples_after(n) for n in range(7)] == [sum(sizes[:n]) for n in range(7)]
            assert length.total_steps == 6
