"""Reads the directories that kit wrote before it had one format: exchange, and the engines' own.

    exchange-step-…/exchange.json           fp32 tensors under Hugging Face names; ``weight_map`` has each kind's files
    step-…/manifest.json, format kit-native
        state/state-rank….json              torch: each rank's boxes of the tensors, in safetensors
        state/native/*.pt                   DeepSpeed's own files
        state/.metadata                     Megatron's torch_dist

DeepSpeed's state on NVMe was flat sub groups of one layout, which only the kit that wrote it can read.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kit.addons.importers import deepspeed
from kit.addons.importers.model_of import adapters_of_run, model_of
from kit.addons.importers.stored import FoundState, StoredState, StoredTensor, reader_errors, stored, tensors_of
from kit.addons.importers.tensors import MOMENTS, sources
from kit.engines.io.sharded_safetensors import SafetensorsSource
from kit.engines.protocol import StateKind, TensorSource
from kit.errors import CheckpointError
from kit.specs.job import LoraSpec, OptimizerName
from kit.specs.model import ModelSpec
from kit.specs.text_files import parse_json, read_text
from kit.specs.validation import SPEC
from kit.training.checkpoint.files import Files, read_checked, verify
from kit.training.checkpoint.formats import Opened
from kit.training.checkpoint.storage import MANIFEST
from kit.training.counters import Counters

_EXCHANGE = "exchange.json"
_VERSION = 3


@dataclass(frozen=True)
class _Exchange:
    """Content of ``exchange.json``."""

    __pydantic_config__ = SPEC
    counters: Counters
    model: ModelSpec
    files: Files
    weight_map: dict[StateKind, dict[str, str]]
    lora: LoraSpec | None = None
    optimizer: OptimizerName = "adamw"
    chat_template: str | None = None


@dataclass(frozen=True)
class _Native:
    """Content of ``manifest.json``."""

    __pydantic_config__ = SPEC
    plan_hash: str
    world_size: int
    model: str
    counters: Counters
    files: Files


def recognise(path: Path) -> FoundState | None:
    """A checkpoint of an earlier kit."""
    if (path / _EXCHANGE).is_file():
        return FoundState("an earlier kit, any layout", path, state=partial(_exchange_state, path))
    if not (path / MANIFEST).is_file():
        return None
    with reader_errors(path / MANIFEST, "kit"):
        if parse_json(read_text(path / MANIFEST, 1 << 24))["format"] != "kit-native":
            return None
    return FoundState("an earlier kit, one engine", path, state=partial(_native_state, path))


def open_native(path: Path, found: FoundState, model: str | None) -> Opened:
    """Open a checkpoint with all its hashes compared. Raises CheckpointError."""
    if (path / _EXCHANGE).is_file():
        said = _read(path / _EXCHANGE, _Exchange, "kit-exchange")
        verify(path, said.files)
        kinds = said.weight_map if said.optimizer.startswith("adamw") else (StateKind.MASTER,)
        of_kind: dict[StateKind, TensorSource] = {kind: _source(path, said, kind) for kind in kinds}
        return Opened(said.model, said.counters, of_kind, said.lora, chat_template=said.chat_template)
    native = _read(path / MANIFEST, _Native, "kit-native")
    verify(path, native.files)
    if (path / "state" / ".metadata").is_file():
        from kit.addons.importers.megatron.opened import open_megatron

        opened = open_megatron(path, dataclasses.replace(found, directory=path / "state"), model)
        return dataclasses.replace(opened, counters=native.counters)
    spec, lora = model_of(path, model), adapters_of_run(path, model)
    state = found.state()
    if not state.weights:
        raise CheckpointError(
            f"{path} has state on NVMe in sub groups of its own layout; export it with the kit that wrote it"
        )
    return Opened(spec, state.counters, sources(state, spec, adapters=lora is not None), lora, state.notes)


def _read(path: Path, kind: type[Any], name: str) -> Any:
    with reader_errors(path, "an earlier kit"):
        return read_checked(path, kind, name, _VERSION)


def _source(path: Path, said: _Exchange, kind: StateKind) -> SafetensorsSource:
    return SafetensorsSource({name: path / file for name, file in said.weight_map[kind].items()})


def _exchange_state(path: Path) -> StoredState:
    said = _read(path / _EXCHANGE, _Exchange, "kit-exchange")
    found = {kind: tensors_of(_source(path, said, kind)) for kind in said.weight_map}
    return StoredState(found.pop(StateKind.MASTER), found, said.counters, model=said.model.name)


def _native_state(path: Path) -> StoredState:
    said = _read(path / MANIFEST, _Native, "kit-native")
    layout: dict[str, int | str] = {"engine": said.model.partition(" ")[0], "world_size": said.world_size}
    state = StoredState({}, {}, moments_elsewhere=True)
    if (path / "state" / "state-rank00000.json").is_file():
        with reader_errors(path / "state", "an earlier kit"):
            state = _boxes(path / "state")
    elif any((path / "state" / "native").glob("*.pt")):
        state = _without_zero(deepspeed.read_deepspeed(path / "state" / "native"), path / "state" / "native")
    steps = said.counters.optimizer_steps if state.moments or state.moments_elsewhere else 0
    counters = dataclasses.replace(said.counters, optimizer_steps=steps)
    return dataclasses.replace(state, counters=counters, layout=layout)


def _without_zero(state: StoredState, directory: Path) -> StoredState:
    """With the master weights and moments of DeepSpeed without ZeRO, which has them by number: matrices first, then
    vectors, as kit grouped them, each in the order of the modules. ZeRO's are in the state already."""
    path = deepspeed.deepspeed_files(directory)[0]
    if state.moments or state.layout.get("zero_stage") != 0:
        return state
    with reader_errors(path, "an earlier kit"):
        loaded = deepspeed.load_file(path)
        optimizer = loaded["optimizer"]
        first = {tensor.data_ptr(): name for name, tensor in reversed(loaded["module"].items())}  # once, if tied
        names = sorted((n for n in state.weights if n in first.values()), key=lambda n: len(state.weights[n].shape) < 2)
        adam = optimizer.get("optimizer_state_dict", optimizer)["state"]  # in bf16 beside the masters
        masters = [each for group in optimizer.get("fp32_groups", ()) for each in group]
        found = {StateKind.MASTER: masters} if masters else {}
        if all(kind.value in each for kind in MOMENTS for each in adam.values()):  # another optimizer has others
            found |= {kind: [adam[n][kind.value] for n in range(len(adam))] for kind in MOMENTS}
        for tensors in found.values():
            if [tuple(each.shape) for each in tensors] != [state.weights[name].shape for name in names]:
                raise ValueError("the optimizer's tensors are not those of the model")
    whole = {
        kind: {name: stored(tensor.detach) for name, tensor in zip(names, tensors, strict=True)}
        for kind, tensors in found.items()
    }
    weights = {**state.weights, **whole.pop(StateKind.MASTER, {})}
    return dataclasses.replace(state, weights=weights, moments=whole, notes=() if whole else state.notes)


def _boxes(directory: Path) -> StoredState:
    """The torch engine's files: kind → name → whole tensor, from the boxes of all ranks."""
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("state-rank*.json"))]
    found: dict[str, dict[str, StoredTensor]] = {}
    for kind, of_kind in ranks[0]["weight_map"].items():
        for name in of_kind:
            shape = tuple(ranks[0]["boxes"][name][0])
            parts = [(directory / rank["weight_map"][kind][name], rank["boxes"][name][1]) for rank in ranks]
            found.setdefault(kind, {})[name] = StoredTensor(shape, torch.float32, partial(_joined, name, shape, parts))
    moments = {kind: found[kind.value] for kind in MOMENTS if kind.value in found}
    notes = () if len(moments) == len(MOMENTS) else ("without both moments of Adam: weights only",)
    return StoredState(found[StateKind.MASTER.value], {} if notes else moments, notes=notes)


def _joined(name: str, shape: tuple[int, ...], parts: list[tuple[Path, list[int]]]) -> torch.Tensor:
    whole = torch.full(shape, torch.nan)
    for path, start in parts:
        part = SafetensorsSource({name: path}).read(name)
        whole[tuple(slice(at, at + size) for at, size in zip(start, part.shape, strict=True))] = part
    return whole
