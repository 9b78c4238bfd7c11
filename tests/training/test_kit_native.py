"""Directories that kit wrote before it had one format become checkpoints of today, every tensor and counter."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kit.errors import CheckpointError
from kit.specs.strict_yaml import to_plain
from kit.training.checkpoint.convert import convert
from kit.training.checkpoint.files import record_of, sealed
from kit.training.checkpoint.inspected import inspected
from kit.training.checkpoint.manifest import FOLDERS, Checkpoint
from tests.support import tiny
from tests.support.refusals import refusal
from tests.training import cases

MODEL = tiny.model()


def tensors_of(kind: int) -> dict[str, torch.Tensor]:
    from kit.engines.huggingface.models import tensor_shapes

    generator = torch.Generator().manual_seed(kind)
    return {name: torch.rand(shape, generator=generator) for name, shape in tensor_shapes(MODEL).items()}


STATE = {kind.value: tensors_of(number) for number, kind in enumerate(FOLDERS)}


def seal(directory: Path, name: str, **said: Any) -> None:
    """The manifest of a directory, with the hash of every file."""
    files = {
        str(path.relative_to(directory)): dataclasses.asdict(record_of(path))
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    counters = dataclasses.asdict(cases.COUNTERS)
    (directory / name).write_text(json.dumps(sealed({"version": 3, "counters": counters, "files": files, **said})))


def exchange(directory: Path) -> None:
    """As version 3 of ``exchange.json`` was."""
    directory.mkdir(parents=True)
    weight_map = {}
    for kind, tensors in STATE.items():
        save_file(tensors, directory / f"{kind}-00001.safetensors")
        weight_map[kind] = dict.fromkeys(tensors, f"{kind}-00001.safetensors")
    seal(directory, "exchange.json", format="kit-exchange", model=to_plain(MODEL), weight_map=weight_map)


def native(directory: Path) -> None:
    """As two FSDP2 processes wrote it: rows of each tensor, and which part of the whole they are."""
    (directory / "state").mkdir(parents=True)
    for rank in range(2):
        boxes: dict[str, Any] = {}
        weight_map: dict[str, dict[str, str]] = {}
        for kind, tensors in STATE.items():
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


@pytest.mark.parametrize("make", [exchange, native])
def test_it_becomes_a_checkpoint_of_today(tmp_path, make):
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    make(path)
    tiny.plan(MODEL).save(tmp_path / "run" / "plan.yaml")
    said = inspected(path)
    assert (said.format, said.step, said.adam) == ("kit-native", 3, True)
    assert any("--to step" in command for command in said.can)
    assert convert(path, "step", tmp_path / "new").endswith("with Adam's state")
    found = Checkpoint(tmp_path / "new")
    found.verify()
    assert (found.manifest.counters, found.manifest.kinds) == (cases.COUNTERS, tuple(FOLDERS))
    for kind in FOLDERS:
        source = found.source(kind)
        assert sorted(source.names()) == sorted(STATE[kind.value])
        assert all(torch.equal(source.read(name), tensor) for name, tensor in STATE[kind.value].items())
    victim = next(path.rglob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-4])
    assert re.search(f"{victim.name} has", refusal(CheckpointError, convert, path, "step", tmp_path / "other"))


def test_state_on_nvme_is_refused(tmp_path):
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    (path / "state" / "native").mkdir(parents=True)
    save_file({"master": torch.zeros(3)}, path / "state" / "native" / "rank-00000-group-00000.safetensors")
    seal(path, "manifest.json", format="kit-native", plan_hash="x", world_size=2, model="deepspeed x")
    tiny.plan(MODEL).save(tmp_path / "run" / "plan.yaml")
    with pytest.raises(CheckpointError, match="has state on NVMe in sub groups of its own layout"):
        convert(path, "step", tmp_path / "new")
