"""A pickle that would run code, planted in the checkpoints of every engine: it is refused, and it never runs."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from kit.errors import CheckpointError
from kit.specs.run import CheckpointSpec
from kit.training.checkpoint.files import record_of, with_checksum
from tests.support import tiny
from tests.support.hostile import spoil
from tests.support.refusals import refusal
from tests.support.workers import pool
from tests.training import runs

ENGINES = {
    "torch FSDP2": tiny.plan(engine="torch", zero_stage=3, dp=2),
    "ZeRO-2": tiny.plan(engine="deepspeed", zero_stage=2, dp=2),
    "Megatron": tiny.plan(engine="megatron", implementation="local", tp=2),
}


class Canary:
    """Makes a directory where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.everyday("torch FSDP2", "ZeRO-2")
@pytest.mark.parametrize("chosen", ENGINES.values(), ids=ENGINES.keys())
def test_a_planted_pickle_is_refused_and_never_run(chosen, tmp_path):
    rundir = runs.prepare(tmp_path / "run", chosen, checkpoint=CheckpointSpec(every_steps=1))
    engine = chosen.layout.engine
    pool(engine, 2).run(runs.run, rundir, 1)
    good = rundir.path / "checkpoints" / "step-00000001"
    sang = tmp_path / "sang"
    plants = [plant_unlisted, plant_no_files, plant_no_weights, plant_in_safetensors]
    directories = []
    for plant in plants:
        shutil.copytree(good, tmp_path / plant.__name__ / "step-00000001")
        directories.append(tmp_path / plant.__name__ / "step-00000001")
        plant(directories[-1], Canary(sang))
    for plant, *said in zip(plants, *pool(engine, 2).run(refusals, rundir, [*directories, good]), strict=False):
        assert said[0] == said[1], "all ranks say the same"
        assert plant.__doc__ in said[0]
        assert "\n" not in said[0]
        assert str(tmp_path / plant.__name__) in said[0]
        assert any(fix in said[0] for fix in ("copy", "remove it", "use a checkpoint", "give the directory"))
    assert not sang.exists()


def refusals(rundir, directories):
    """What is said of each directory; the last one is good, and loads on the same engine."""
    from kit.engines import build_engine
    from kit.training.checkpoint.manager import CheckpointManager
    from kit.training.counters import run_length

    with closing(build_engine(runs.with_settings(rundir))) as engine:
        checkpoints = CheckpointManager.open(rundir, run_length(rundir.plan, rundir.run)).kept
        said = []
        for directory in directories[:-1]:
            said.append(refusal(CheckpointError, checkpoints.load, engine, directory))
            dist.barrier()
        assert checkpoints.load(engine, directories[-1]).step == 1
    return said


def plant_unlisted(directory, canary):
    """is not in the checkpoint's manifest"""
    torch.save(canary, directory / "model" / "more.pt")


def plant_no_files(directory, canary):
    """should have at least 1 item"""
    plant_unlisted(directory, canary)
    rewrite(directory, {})


def plant_no_weights(directory, canary):
    """it has no hash of model/"""
    plant_unlisted(directory, canary)
    files = json.loads((directory / "manifest.json").read_text())["files"]
    rewrite(directory, {name: record for name, record in files.items() if not name.startswith("model/")})


def plant_in_safetensors(directory, canary):
    """cannot be read as safetensors"""
    torch.save(canary, sorted(directory.glob("model/*.safetensors"))[-1])
    rewrite(directory)


def rewrite(directory, files=None):
    """A manifest that agrees with what lies there, as its author would write it."""
    listed = json.loads((directory / "manifest.json").read_text())["files"]
    found = {name: vars(record_of(directory / name)) for name in listed} if files is None else files
    spoil(directory / "manifest.json", ("files",), found, with_checksum)
