"""Reads what torch and transformers write: distributed checkpoints (DCP), safetensors, and files of ``torch.save``."""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kit.engines.io.sharded_safetensors import SafetensorsSource
from kit.errors import CheckpointError
from kit.specs.text_files import parse_json, read_text
from kit.training.checkpoint.counters import START
from kit.training.checkpoint.foreign.source import MOMENTS, ForeignState, StoredTensor, described, require_one_step

_ADAM = re.compile(r"(?:optim(?:izer)?\.)*state\.(.+)\.(exp_avg|exp_avg_sq|step)")
"""Key of one of Adam's tensors in a distributed checkpoint (torch/distributed/checkpoint/state_dict.py)."""
_NOT_WEIGHTS = ("optim", "state.", "param_groups", "lr_scheduler", "rng", "train_state", "dataloader")


def read_distributed(directories: Sequence[Path]) -> ForeignState:
    """Open checkpoints of torch.distributed.checkpoint that belong together: weights, and Adam's state in the same or
    in another directory. Raises CheckpointError."""
    from kit.engines.megatron.checkpoint.torch_dist import Checkpoint

    found: dict[str, StoredTensor] = {}
    for directory in directories:
        with described(directory, "torch.distributed.checkpoint"):
            checkpoint = Checkpoint(directory)
            _require_files(checkpoint)
            for key, stored in checkpoint.tensors.items():
                shape = tuple(stored.size)
                found[key] = StoredTensor(shape, stored.properties.dtype, partial(whole, checkpoint, key))
    weights = {key: tensor for key, tensor in found.items() if not key.startswith(_NOT_WEIGHTS)}
    if weights and all(key.startswith("model.") for key in weights):
        inner = {key.removeprefix("model."): tensor for key, tensor in weights.items()}
        # A model's own names begin with "model." too: only its output projection and other parts do not.
        if any(key.startswith("model.") for key in inner) or not any("layers." in key for key in inner):
            weights = inner
    by_kind: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in found.items():
        if match := _ADAM.fullmatch(key):
            by_kind.setdefault(match[2], {})[match[1]] = tensor
    notes, counters, moments = [], START, {}
    steps = {int(tensor.read()) for tensor in by_kind.get("step", {}).values()}
    missing = [name for name in ("exp_avg", "exp_avg_sq", "step") if not by_kind.get(name)]
    if not missing:
        require_one_step(directories[-1], steps)
        moments = {kind: by_kind[kind.value] for kind in MOMENTS}
        counters = dataclasses.replace(START, step=min(steps), optimizer_steps=min(steps))
    else:
        notes.append(f"Adam's {' and '.join(missing)} is missing: weights only")
    return ForeignState(weights, moments, counters, notes=tuple(notes))


def _require_files(checkpoint: Any) -> None:
    storage = checkpoint._metadata.storage_data or {}
    for name in sorted({info.relative_path for info in storage.values()}):
        path = checkpoint.directory / Path(name).name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; copy the checkpoint again, from every rank")


def whole(checkpoint: Any, key: str) -> torch.Tensor:
    """The whole tensor ``key`` of a ``torch_dist.Checkpoint``. Raises CheckpointError."""
    from kit.engines.megatron.checkpoint.torch_dist import ReadBlock

    shape = tuple(checkpoint.tensors[key].size)
    full = torch.empty(shape, dtype=checkpoint.tensors[key].properties.dtype)

    def take(offsets: tuple[int, ...], part: torch.Tensor) -> None:
        full[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))] = part

    checkpoint.read([ReadBlock(key=key, shape=shape, offsets=(0,) * len(shape), sizes=shape, take=take)])
    return full


def read_weights(files: Mapping[str, Path]) -> ForeignState:
    """Open safetensors or ``.bin`` files; ``files``: name of a tensor → its file. Raises CheckpointError."""
    source = SafetensorsSource(files)
    found = {}
    for name in source.names():
        shape = source.shape(name)
        dtype = (source.read_block(name, 0, 0, 0) if shape else source.read(name)).dtype
        found[name] = StoredTensor(shape, dtype, partial(source.read, name))
    return ForeignState(found)


def verify_archives(directory: Path) -> None:
    """Read every file of ``torch.save`` in a checkpoint and compare it with the CRC-32 of its parts, which torch
    does not compare. Raises CheckpointError that names the damaged file."""
    from kit.engines.megatron.checkpoint.torch_dist import Checkpoint

    paths = [directory] if directory.is_file() else sorted(directory.rglob("*"))
    for path in paths:
        if path.name == ".metadata":
            with described(path, "torch.distributed.checkpoint"):
                Checkpoint(path.parent).verify()
        if path.suffix in (".pt", ".bin") and path.is_file():
            damaged = None
            try:
                if zipfile.is_zipfile(path):
                    with zipfile.ZipFile(path) as archive:
                        damaged = archive.testzip()
            except Exception as error:  # a damaged archive may raise anything, is_zipfile too
                damaged = str(error)[:200]
            if damaged is not None:
                raise CheckpointError(f"{path} is damaged ({damaged}); copy the checkpoint again")


def with_trainer_state(state: ForeignState, directory: Path) -> ForeignState:
    """``state`` with the step and the tokens of ``trainer_state.json``, which transformers' Trainer writes beside it.

    Raises CheckpointError if the file is damaged, or is of another step.
    """
    path = directory / "trainer_state.json"
    if not path.is_file():
        return state
    with described(path, "transformers' Trainer"):
        said = parse_json(read_text(path, 1 << 30))
        step, tokens = int(said["global_step"]), int(said.get("num_input_tokens_seen") or 0)
    counters = state.counters
    if counters.step and counters.step != step:
        raise CheckpointError(
            f"{directory} is of step {step} by trainer_state.json and of step {counters.step} by its state; they "
            f"belong to different checkpoints: take another one"
        )
    samples = counters.samples_seen
    tokens = tokens if tokens >= samples > 0 else 0
    return dataclasses.replace(state, counters=dataclasses.replace(counters, step=step, tokens_seen=tokens))


def adapter_config(directory: Path) -> dict[str, Any]:
    """Content of peft's ``adapter_config.json``. Raises CheckpointError."""
    path = directory / "adapter_config.json"
    with described(path, "peft"):
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found)
