"""A run's newest checkpoint is damaged, on every engine: it is named and set aside, and the one before it is loaded."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from kit.specs.job import OptimizerSpec
from kit.training.checkpoint.checkpoints import RunCheckpoints
from kit.training.checkpoint.store import state_of
from kit.training.counters import Counters
from tests.support import tiny
from tests.support.workers import pool
from tests.training import cases

ENGINES: dict[str, dict[str, Any]] = {
    "torch": {"engine": "torch", "zero_stage": 3, "job": {"optimizer": OptimizerSpec(name="adafactor")}},
    "deepspeed": {"engine": "deepspeed", "zero_stage": 3},
    "megatron": {"engine": "megatron", "zero_stage": 1, "implementation": "local", "job": {"precision": "bf16"}},
}
MOMENT = "exp_avg_sq/model-00001-of-00001.safetensors"
MODEL = "model/model-00001-of-00001.safetensors"


def swap(one: str, other: str) -> Callable[[Path], None]:
    """Two files of a checkpoint."""

    def swapped(step: Path) -> None:
        (step / one).rename(step / "x")
        (step / other).rename(step / one)
        (step / "x").rename(step / other)

    return swapped


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Other bytes in a file."""
    return lambda step: (step / name).write_bytes(change((step / name).read_bytes())) and None


def replace(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """Which must be there."""

    def replaced(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new)

    return replaced


def stale(what: str) -> Callable[[Path], None]:
    """The checkpoint before it, or a file of that, under its name."""

    def copied(step: Path) -> None:
        before = step.with_name("step-00000001") / what
        shutil.copytree(before, step, dirs_exist_ok=True) if before.is_dir() else shutil.copy(before, step / what)

    return copied


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file is dropped": (lambda step: (step / MOMENT).unlink(), rf"{MOMENT} is missing"),
    "a file is cut": (edit(MODEL, lambda data: data[:-4]), rf"{MODEL} has \d+ bytes where \d+ were written"),
    "weights and moments are swapped": (swap(MODEL, MOMENT), rf"({MODEL}|{MOMENT}) is corrupted"),
    "two ranks' files are swapped": (
        swap("random/rank-00000.json", "random/rank-00001.json"),
        r"random/rank-0000\d.json (is corrupted|has \d+ bytes)",
    ),
    **{
        f"a bit of {name} is flipped": (
            edit(name, lambda data: data[:-1] + bytes([data[-1] ^ 1])), rf"{name} is corrupted"
        )
        for name in (MODEL, MOMENT, "random/rank-00000.json", "random/rank-00001.json")
    },
    "a bit of a counter is flipped": (
        edit("manifest.json", replace(b'"samples_seen": 16', b'"samples_seen": 17')), r"manifest.json .*its own hash"
    ),
    "the manifest lies of a tensor's file": (
        edit("manifest.json", replace(b'"model.norm.weight": "model', b'"model.norm.weight": "nodel')), "its own hash"
    ),
    "the index lies of a tensor's file": (
        edit("model/model.safetensors.index.json", replace(b'"model.norm.weight": "m', b'"model.norm.weight": "n')),
        r"index.json is corrupted",
    ),
    "the manifest is cut": (edit("manifest.json", lambda data: data[:-9]), r"manifest.json is damaged"),
    "the manifest is missing": (lambda step: (step / "manifest.json").unlink(), "is not a checkpoint"),
    "the manifest is of the step before": (stale("manifest.json"), r"step-00000002 is of step 1 by its manifest"),
    "all of it is of the step before": (stale(""), r"step-00000002 is of step 1 by its manifest"),
}  # fmt: skip


def counters(step: int) -> Counters:
    return Counters(step, 8 * step, 256 * step, step, 0)


def found_by(rundir: tiny.TinyRunDirectory, names: list[str]) -> dict[str, tuple[int, str, bool, list[str]]]:
    """Damage → the step that is loaded, what is said, whether the state is that of it, and the directories then."""
    kept = RunCheckpoints(rundir.path / "checkpoints", rundir.plan, keep_last=9)
    found, expected = {}, {}
    with closing(cases.build(rundir)) as engine:
        for step in (1, 2):
            cases.steps(engine, rundir, step - 1, 1)
            kept.write(state_of(engine), counters(step), engine.is_main)
            expected = cases.held(engine) if step == 1 else expected
        for name in names:
            assert kept.load(engine, kept.directory(2)) == counters(2)
            assert not cases.same(cases.held(engine), expected) or not expected
            root, said = rundir.path / name, []
            if engine.is_main:
                shutil.copytree(kept.root, root)
                DAMAGE[name][0](root / "step-00000002")
            dist.barrier()
            taken = dataclasses.replace(kept, root=root, log=said.append).load_newest(engine)
            there = sorted(path.name for path in root.iterdir() if path.is_dir())
            found[name] = taken and taken.step, " ".join(said), cases.same(cases.held(engine), expected), there
            dist.barrier()
    return found


@pytest.mark.parametrize("chosen", ENGINES.values(), ids=ENGINES)
def test_the_one_before_it_is_taken_and_said(tmp_path, chosen):
    rundir = tiny.run_directory(tmp_path / "run", tiny.plan(dp=2, **chosen))
    ranks = pool(chosen["engine"], 2).run(found_by, rundir, list(DAMAGE))
    for name, (_, words) in DAMAGE.items():
        steps, said, same, there = zip(*(found[name] for found in ranks), strict=True)
        assert (steps, same) == ((1, 1), (True, True)), name
        assert there[0] == ["step-00000001", "step-00000002.damaged"], name
        assert re.search(rf"step-00000002 is not usable: .*{words}.*; trying the one before it", "".join(said)), name
