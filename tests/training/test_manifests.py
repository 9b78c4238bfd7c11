"""Manifests of checkpoints: a change is refused by name or is what is read; counters agree."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import CheckpointError
from kit.specs.run import BatchRampSpec, ScheduleSpec
from kit.specs.strict_yaml import to_plain
from kit.training.checkpoint.files import FileRecord, with_checksum
from kit.training.checkpoint.manifest import FOLDERS, Checkpoint, Manifest, kinds_of, manifest_json
from kit.training.checkpoint.storage import MANIFEST, steps_in
from kit.training.counters import LARGEST, Counters, RunLength, run_length
from tests.support import hostile, tiny
from tests.support.files import file_with
from tests.support.refusals import refusal
from tests.training.cases import COUNTERS

SHARD, RECORD = "model-00001-of-00001.safetensors", {"bytes": 4, "xxh3_128": "0" * 32}
KINDS = kinds_of("adamw")
NAMES = [*(f"{folder}/{SHARD}" for folder in FOLDERS.values()), *(f"random/rank-0000{rank}.json" for rank in (0, 1))]
GOOD: dict[str, Any] = manifest_json(
    Manifest(
        counters=COUNTERS,
        model=tiny.model(),
        files={name: FileRecord(**RECORD) for name in NAMES},
        weight_map={"x": SHARD},
        kinds=KINDS,
        plan_hash="a" * 64,
        world_size=2,
        scalars={"loss_scale": 2.0, "steps": 3},
    )
)


def read(path) -> dict[str, Any]:
    """What kit takes from a manifest, counters beside the rest."""
    found = to_plain(Checkpoint(path.parent).manifest)
    return found.pop("counters") | found


def one_change() -> st.SearchStrategy[dict[str, Any]]:
    """Of anything but the sizes of the model, which tests/specs changes."""
    rest = {key: GOOD[key] for key in ("model", "sha256")}
    return hostile.mutated({key: value for key, value in GOOD.items() if key not in rest}).map(lambda f: f[1] | rest)


@hostile.fuzz(250)
@given(one_change(), st.booleans())
def test_one_change_is_refused_by_name_or_is_what_is_read(tmp_path_factory, tree, seals):
    """By who knows of the hash, or does not: then nothing is read. An empty ``lora`` is one of defaults."""
    path = file_with(tmp_path_factory.mktemp("changed") / MANIFEST, json.dumps(with_checksum(tree) if seals else tree))
    try:
        found = read(path)
    except CheckpointError as error:
        words = str(error)
        assert (str(path) in words, "\n" in words, len(words) < 700) == (True, False, True)
        return
    assert seals or with_checksum(tree) == GOOD
    assert tree.keys() <= GOOD.keys()
    said = {**tree["counters"], **tree}
    taken = {key: json.dumps(found[key], sort_keys=True) for key in found.keys() & said.keys() - {"lora"}}
    assert taken == {key: json.dumps(said[key], sort_keys=True) for key in taken}
    numbers = [found[each.name] for each in dataclasses.fields(Counters)[:5]]
    assert all(type(number) is int and 0 <= number <= LARGEST for number in numbers)
    assert 1 <= found.get("world_size", 1) <= 1 << 24


def test_no_flipped_bit_changes_what_is_read(tmp_path):
    """A flipped bit in white space may pass. A flipped bit in anything that has a meaning is noticed."""
    path, noticed = tmp_path / MANIFEST, 0
    content = json.dumps(GOOD, indent=1).encode()
    path.write_bytes(content)
    expected = Checkpoint(tmp_path).manifest
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << (place % 8)]) + content[place + 1 :])
        try:
            assert Checkpoint(tmp_path).manifest == expected
        except CheckpointError:
            noticed += 1
    assert noticed > len(content) / 6


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("files",), {}, "should have at least 1 item"),
        (("files", f"exp_avg/{SHARD}"), ..., f"it has no hash of exp_avg/{SHARD}"),
        (("weight_map", "x"), "other.safetensors", "it has no hash of exp_avg/other.safetensors"),
        (("kinds",), ["master", "exp_avg"], "kinds are master, exp_avg, which is not the state of adamw"),
        (("optimizer",), "lion", "which is not the state of lion"),
        (("files", "random/rank-00000.json"), ..., "random/ must have one file for each of 2 ranks"),
        (("files", "random/rank-00002.json"), RECORD, "random/ must have one file for each of 2 ranks"),
        (("files", "private/rank-00000.safetensors"), RECORD, "private/ must have one file for each of 2 ranks"),
        (("world_size",), 3, "one file for each of 3 ranks"),
        (("world_size",), 0, "world_size=0"),
        (("world_size",), (1 << 24) + 1, "world_size=16777217"),
        (("files", "model/../../x"), RECORD, "is outside the checkpoint"),
        (("files", "/x"), RECORD, "/x is outside the checkpoint"),
        (("files", f"model/{SHARD}", "bytes"), -1, "bytes=-1: should be greater than or"),
        (("files", f"model/{SHARD}", "bytes"), 1.0, "bytes=1.0: should be a valid integer"),
        (("files", f"model/{SHARD}", "xxh3_128"), "0", "String should match pattern"),
        (("files", f"model/{SHARD}", "xxh3_128"), ..., "xxh3_128: is required and missing"),
        (("counters",), {"step": 1}, "counters.samples_seen: is required and missing"),
        (("model",), {"name": "x"}, "manifest.json is damaged"),
        (("format",), "other", "format is not 'kit-checkpoint'"),
        (("format",), "kit-native", "has format 'kit-native' version 1, this kit reads 'kit-checkpoint' version 1"),
        (("version",), 2, "version 2, this kit reads 'kit-checkpoint' version 1; write it anew for this kit: kit conv"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(tmp_path, place, value, words):
    """Though the hash is right. Without one, no manifest of today is read."""
    changed = hostile.changed(GOOD, place, value)
    for tree, said in ((with_checksum(changed), words), (hostile.changed(GOOD, ("sha256",), ...), "hash (sha256)")):
        assert said in refusal(CheckpointError, read, file_with(tmp_path / MANIFEST, json.dumps(tree)))


def test_the_newest_is_that_of_the_highest_step(tmp_path):
    """In whatever order the file system lists them."""
    others = ("step-7", ".step-00000200.partial", "step-00000300.damaged", "latest")
    for name in (*(f"step-{step:08d}" for step in (7, 30, 100, 20, 9)), *others):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000400").touch()
    assert list(steps_in(tmp_path)) == [100, 30, 20, 9, 7]
    assert steps_in(tmp_path / "nowhere") == {}


# Counters


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
def test_agree_with_each_other(counters, words):
    assert re.search(words, refusal(ValueError, lambda: Counters(*counters)))


def test_that_agree_are_read():
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
def test_agree_with_the_run(tmp_path, step, samples, metrics, same_plan, words):
    """Which ends after six steps of two samples."""
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    length = RunLength(6, lambda steps: 2 * steps)
    counters, checkpoint = Counters(step, samples, samples, step, 0), tmp_path / "checkpoints" / "step-00000004"
    with pytest.raises(CheckpointError, match=words) if words else nullcontext():
        length.check(counters, checkpoint, same_plan)


def test_of_a_schedule():
    """Batches of 8; a ramp over 8 sequences in three steps, of 8 / 3 sequences each: Megatron's rule."""
    plan = tiny.plan(micro_batch_size=2, gradient_accumulation_steps=4)
    ramp = ScheduleSpec(warmup_steps=0, batch_ramp=BatchRampSpec(start=2, increment=2, samples=8))
    for schedule, sizes in ((ScheduleSpec(), [8] * 6), (ramp, [2, 2, 4, 8, 8, 8])):
        length = run_length(plan, tiny.run_directory_spec(steps=6, schedule=schedule))
        assert [length.samples_after(n) for n in range(7)] == [sum(sizes[:n]) for n in range(7)]
        assert length.total_steps == 6
