"""Directories that kit wrote before it had one format become checkpoints of today, every tensor and counter."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.addons.importers.inspected import inspected
from kit.errors import CheckpointError
from kit.specs.strict_yaml import to_plain
from kit.training.checkpoint.convert import convert
from kit.training.checkpoint.files import record_of, with_checksum
from kit.training.checkpoint.manifest import FOLDERS, Checkpoint
from kit.training.checkpoint.store import export_tensors
from tests.support import tiny
from tests.support.checkpoints import InMemory, same_tensors
from tests.support.refusals import refusal
from tests.support.workers import pool
from tests.training import cases

MODEL = tiny.model()


def tensors_of(kind: int) -> dict[str, torch.Tensor]:
    from kit.engines.huggingface.models import tensor_shapes

    generator = torch.Generator().manual_seed(kind)
    return {name: torch.rand(shape, generator=generator) for name, shape in tensor_shapes(MODEL).items()}


STATE = {kind.value: tensors_of(number) for number, kind in enumerate(FOLDERS)}


DEEPSPEED = {"engine": "deepspeed", "dp": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
STEP = "step-00000003"


def seal(directory: Path, name: str, **said: Any) -> None:
    """The manifest of a directory, with the hash of every file."""
    files = {
        str(path.relative_to(directory)): dataclasses.asdict(record_of(path))
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    counters = dataclasses.asdict(cases.COUNTERS)
    (directory / name).write_text(
        json.dumps(with_checksum({"version": 3, "counters": counters, "files": files, **said}))
    )


def exchange(directory: Path) -> None:
    """As version 3 of ``exchange.json`` was."""
    directory.mkdir(parents=True)
    weight_map = {}
    for kind, tensors in STATE.items():
        save_file(tensors, directory / f"{kind}-00001.safetensors")
        weight_map[kind] = dict.fromkeys(tensors, f"{kind}-00001.safetensors")
    seal(directory, "exchange.json", format="kit-exchange", model=to_plain(MODEL), weight_map=weight_map)


def native(directory: Path, kinds: int = 3) -> None:
    """As two FSDP2 processes wrote it: rows of each tensor, and which part of the whole they are. ``kinds``: how many
    of the master weights and the two moments."""
    (directory / "state").mkdir(parents=True)
    for rank in range(2):
        boxes: dict[str, Any] = {}
        weight_map: dict[str, dict[str, str]] = {}
        for kind, tensors in list(STATE.items())[:kinds]:
            file, own = f"{kind}-rank{rank:05d}-00001.safetensors", {}
            for name, tensor in tensors.items():
                half = -(-len(tensor) // 2)
                own[name] = tensor[rank * half : (rank + 1) * half].contiguous()
                boxes[name] = [list(tensor.shape), [rank * half, *[0] * (tensor.ndim - 1)]]
            save_file(own, directory / "state" / file)
            weight_map[kind] = dict.fromkeys(own, file)
        index = {"optimizer_steps": 3, "weight_map": weight_map, "boxes": boxes}
        (directory / "state" / f"state-rank{rank:05d}.json").write_text(json.dumps(index))
    seal(directory, "manifest.json", format="kit-native", plan_hash="x", world_size=2, model="torch x")


@pytest.fixture
def path(tmp_path):
    """Where a checkpoint of a run goes, whose plan is there."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    tiny.plan(MODEL).save(tmp_path / "run" / "plan.yaml")
    return tmp_path / "run" / "checkpoints" / STEP


@pytest.mark.parametrize(("make", "layout"), [(exchange, {}), (native, {"engine": "torch", "world_size": 2})])
def test_it_becomes_a_checkpoint_of_today(tmp_path, path, make, layout):
    make(path)
    said = inspected(path)
    assert (said.format, said.step, said.adam, said.layout) == ("kit-native", 3, True, layout)
    assert any("--to step" in command for command in said.can)
    assert has(convert_native(tmp_path, path), STATE)
    victim = next(path.rglob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-4])
    assert re.search(f"{victim.name} has", refusal(CheckpointError, convert, path, "step", tmp_path / "other"))


def test_weights_without_one_of_the_moments_are_weights_alone(tmp_path, path):
    native(path, kinds=2)
    assert "without both moments of Adam: weights only" in convert(path, "step", tmp_path / "new")
    assert Checkpoint(tmp_path / "new").manifest.counters == dataclasses.replace(cases.COUNTERS, optimizer_steps=0)


def of_deepspeed(directory: Path, stage: int, precision: str) -> dict[str, Any]:
    """As DeepSpeed wrote it for kit, after two steps: what the engine had then."""
    rundir = tiny.run_directory(
        directory, tiny.plan(MODEL, job={"precision": precision}, **DEEPSPEED, zero_stage=stage)
    )
    pool("deepspeed", 2).run(native_of_deepspeed, rundir, directory / "checkpoints" / STEP, timeout_s=200)
    rundir.plan.save(directory / "plan.yaml")
    return {kind.value: load_file(directory / f"{kind.value}.safetensors") for kind in FOLDERS}


def native_of_deepspeed(rundir: tiny.TinyRunDirectory, path: Path) -> None:
    with closing(cases.build(rundir)) as engine:
        cases.steps(engine, rundir, 0, 2)
        for kind in FOLDERS:
            export_tensors(engine, kind, rundir.path / f"{kind.value}.safetensors")
        engine._engine.save_checkpoint(str(path / "state"), tag="native", save_latest=False)
        if engine.is_main:
            seal(path, "manifest.json", format="kit-native", plan_hash="x", world_size=2, model="deepspeed x")


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")], ids=str
)
def test_deepspeeds_own_files_become_one(tmp_path, stage, precision):
    """Masters and both moments, bit for bit."""
    state = of_deepspeed(tmp_path / "run", stage, precision)
    assert has(convert_native(tmp_path, tmp_path / "run" / "checkpoints" / STEP), state)


def test_other_tensors_than_the_models_are_refused(tmp_path):
    """Adam's state of DeepSpeed without ZeRO has numbers for names: shapes tell that they are others."""
    of_deepspeed(tmp_path / "run", 0, "fp32")
    path = tmp_path / "run" / "checkpoints" / STEP
    (file,) = path.rglob("*model_states.pt")
    said = torch.load(file, weights_only=False)
    states = said["optimizer"]["state"]
    states[0], states[1] = states[1], states[0]
    torch.save(said, file)
    (path / "manifest.json").unlink()
    seal(path, "manifest.json", format="kit-native", plan_hash="x", world_size=2, model="deepspeed x")
    assert "the optimizer's tensors are not those of the model" in refusal(
        CheckpointError, convert, path, "step", tmp_path / "new"
    )


def test_megatrons_own_files_become_one(tmp_path, path):
    """torch_dist, as kit writes it for Megatron-LM too."""
    exchange(tmp_path / "old")
    convert(tmp_path / "old", "step", tmp_path / "step")
    convert(tmp_path / "step", "megatron", tmp_path / "theirs", dtype="float32", model=None)
    path.mkdir()
    shutil.move(tmp_path / "theirs" / "iter_0000003", path / "state")
    seal(path, "manifest.json", format="kit-native", plan_hash="x", world_size=2, model="megatron x")
    assert has(convert_native(tmp_path, path), STATE)


def convert_native(tmp_path: Path, path: Path) -> Checkpoint:
    assert convert(path, "step", tmp_path / "new").endswith("with Adam's state")
    found = Checkpoint(tmp_path / "new")
    found.verify()
    assert (found.manifest.counters, found.manifest.kinds) == (cases.COUNTERS, tuple(FOLDERS))
    return found


def has(found: Checkpoint, state: dict[str, dict[str, torch.Tensor]]) -> bool:
    return all(same_tensors(found.source(kind), InMemory(state[kind.value])) for kind in FOLDERS)


def test_state_on_nvme_is_refused(tmp_path, path):
    (path / "state" / "native").mkdir(parents=True)
    save_file({"master": torch.zeros(3)}, path / "state" / "native" / "rank-00000-group-00000.safetensors")
    seal(path, "manifest.json", format="kit-native", plan_hash="x", world_size=2, model="deepspeed x")
    assert "has state on NVMe in sub groups of its own layout" in refusal(
        CheckpointError, convert, path, "step", tmp_path / "new"
    )
