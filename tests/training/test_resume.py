"""A stopped run of which something was changed or damaged: what is refused, by name, and what goes on, from where."""

from __future__ import annotations

import re
import shutil
from functools import partial
from itertools import product

import pytest

from kit.specs.run import CheckpointSpec
from kit.training.checkpoint.files import with_checksum
from tests.support import hostile
from tests.training import runs
from tests.training.disk import full_disk

pytestmark = pytest.mark.usefixtures("one_process")
STEP, BEFORE = "step-00000004", "step-00000002"
MASTER = "model/model-00001-of-00001.safetensors"


def spoil(directory, place, value, seal=with_checksum):
    """Of a manifest; with ``dict``, it keeps the hash that it had."""
    hostile.spoil(directory / "manifest.json", place, value, seal)


def rewrite(directory, name, change):
    """Other bytes in a file."""
    (directory / name).write_bytes(change((directory / name).read_bytes()))


def add(directory, name, link=False):
    """A file that no manifest lists. A directory is none of the files, a link to one is."""
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(directory.parent) if link else path.write_text("{}")


def remove(directory, name):
    (directory / name).unlink()


corrupt = partial(rewrite, name=MASTER, change=lambda content: content[:-1] + bytes([content[-1] ^ 1]))
truncate = partial(rewrite, name=MASTER, change=lambda content: content[:-1])
one_more = partial(spoil, place=("counters", "samples_seen"), value=9, seal=dict)
two_more = partial(spoil, place=("counters", "samples_seen"), value=10)
old = partial(spoil, place=("version",), value=0, seal=dict)
another_optimizer = partial(spoil, place=("optimizer",), value="muon")


def unlisted(name, link, resume, *marks):
    said = rf"^\S+/{STEP}/{name} is not in the checkpoint's manifest: .*remove it"
    changes, case = {STEP: partial(add, name=name, link=link)}, f"{name} {'link' if link else 'file'} {resume}"
    return pytest.param(changes, resume, said, marks=marks, id=case)


REFUSED = [
    # What is changed of which checkpoints, what is resumed, and what is said.
    ({}, None, "continue it with --resume auto"),
    ({}, "gone", "is not a checkpoint"),
    ({}, BEFORE, "is of step 2 and this run has a checkpoint of step 4"),
    ({STEP: one_more}, STEP, r"its own hash \(sha256\) differs"),
    ({STEP: two_more}, STEP, r"metrics\.jsonl has 8 at step 4"),
    ({STEP: another_optimizer}, STEP, "has the state of optimizer.name=muon, and this run has optimizer.name=adamw"),
    ({STEP: another_optimizer}, "auto", "has the state of optimizer.name=muon"),  # nothing is wrong with it: it stays
    ({STEP: old}, STEP, "has format 'kit-checkpoint' version 0, this kit reads 'kit-checkpoint' version 1"),
    ({STEP: old}, "auto", "write it anew for this kit: kit convert model"),
    ({STEP: corrupt}, STEP, "is corrupted.*use an earlier checkpoint or --resume auto"),
    ({STEP: corrupt, BEFORE: truncate}, "auto", r"^no checkpoint in .* is usable \(.*model-00001-of-00001.safetens"),
    *(unlisted("model/deep/er", *each) for each in product((False, True), (STEP, "auto"))),
    *(
        unlisted(*each, pytest.mark.nightly)
        for each in product(("model/more.pt", "more.json", ".hidden"), (False, True), (STEP, "auto"))
    ),
]


@pytest.mark.parametrize(("changes", "resume", "words"), REFUSED)
def test_what_is_refused_stays_as_it_is(stopped, changes, resume, words):
    checkpoints = stopped.path / "checkpoints"
    for name, change in changes.items():
        change(checkpoints / name)
    names, metrics = runs.names(checkpoints), runs.metrics(stopped)
    said = runs.run_failing(stopped, resume=resume if resume in (None, "auto") else checkpoints / resume)
    assert re.search(words, said), said
    aside = ".damaged" if "is usable" in words else ""
    assert runs.names(checkpoints) == [f"{name}{aside * (name in changes)}" for name in names]
    assert runs.metrics(stopped) == metrics


USED = "trying the one before it\nresumed after step 2"
GOES_ON = {
    "as it was": ({}, "resumed after step 4\nstep 5/6"),
    "truncated": ({STEP: truncate}, USED),
    "corrupted": ({STEP: corrupt}, USED),
    "file missing": ({STEP: partial(remove, name=MASTER)}, USED),
    "no manifest": ({STEP: partial(remove, name="manifest.json")}, USED),
    "manifest cut": ({STEP: partial(rewrite, name="manifest.json", change=lambda content: content[:20])}, USED),
    "a number more": ({STEP: one_more}, USED),
    "a kill during a save": (
        {STEP: lambda each: shutil.copytree(each, each.with_name(".step-00000006.partial"))}, "resumed after step 4"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), GOES_ON.values(), ids=GOES_ON)
def test_what_goes_on_is_the_whole_run(whole, stopped, capsys, changes, says):
    checkpoints = stopped.path / "checkpoints"
    for name, change in changes.items():
        change(checkpoints / name)
    runs.resumed(stopped, None)
    said = capsys.readouterr().out
    assert says in said
    assert ("checkpoint step-00000004 is not usable" in said) == (says == USED)
    assert runs.metrics(stopped) == runs.metrics(whole)
    damaged = ["step-00000004.damaged"] if says == USED else []
    assert runs.names(checkpoints) == ["latest", STEP, *damaged, "step-00000006"]


def test_a_full_disk_keeps_the_previous_checkpoint_and_the_run(stopped, capsys):
    rundir = runs.with_run(stopped, checkpoint=CheckpointSpec(every_steps=1, keep_last=2))
    before = runs.names(rundir.path / "checkpoints")
    with full_disk(30_000):
        assert runs.resumed(rundir, None).step == 6
    assert "no checkpoint at step 5, the run goes on: writing the checkpoint" in capsys.readouterr().out
    assert ("checkpoint failed", 5) in [(event["event"], event["step"]) for event in runs.events(rundir)]
    assert runs.names(rundir.path / "checkpoints") == before
    runs.resumed(rundir, None)
    assert [row["step"] for row in runs.metrics(rundir)] == [1, 2, 3, 4, 5, 6]
