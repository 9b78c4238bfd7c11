"""Reads what torch and transformers write: distributed checkpoints (DCP), safetensors, and files of ``torch.save``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from kit.addons.importers.stored import StoredState, StoredTensor, reader_errors
from kit.addons.importers.tensors import MOMENTS, one_step
from kit.addons.importers.torch_dist import Block, Checkpoint, block_of, verify_archive, write_blocks
from kit.engines.huggingface.models import tensor_shapes
from kit.engines.protocol import StateKind
from kit.training.checkpoint.formats import Opened
from kit.training.counters import START

_ADAM = re.compile(r"(?:optim(?:izer)?\.)*state\.(.+)\.(exp_avg|exp_avg_sq|step)")
"""Key of one of Adam's tensors in a distributed checkpoint (torch/distributed/checkpoint/state_dict.py)."""
_NOT_WEIGHTS = ("optim", "state.", "param_groups", "lr_scheduler", "rng", "train_state", "dataloader")


def read_distributed(directories: Sequence[Path]) -> StoredState:
    """Open checkpoints of torch.distributed.checkpoint that belong together: weights, and Adam's state in the same or
    in another directory. Raises CheckpointError."""
    found: dict[str, StoredTensor] = {}
    for directory in directories:
        with reader_errors(directory, "torch.distributed.checkpoint"):
            checkpoint = Checkpoint(directory)
            checkpoint.require_files()
            found |= checkpoint.stored()
    weights = {key: tensor for key, tensor in found.items() if not key.startswith(_NOT_WEIGHTS)}
    if weights and all(key.startswith("model.") for key in weights):
        inner = {key.removeprefix("model."): tensor for key, tensor in weights.items()}
        # A model's own names begin with "model." too: only its output projection and other parts do not.
        if any(key.startswith("model.") for key in inner) or not any("layers." in key for key in inner):
            weights = inner
    of_adam = [(match, found[key]) for key in found if (match := _ADAM.fullmatch(key))]
    by_kind = {kind: {m[1]: tensor for m, tensor in of_adam if m[2] == kind} for kind in (*MOMENTS, "step")}
    missing = [str(kind) for kind, tensors in by_kind.items() if not tensors]
    if missing:
        return StoredState(weights, notes=(f"Adam's {' and '.join(missing)} is missing: weights only",))
    steps = one_step(directories[-1], (int(tensor.read()) for tensor in by_kind["step"].values())) or 0
    counters = dataclasses.replace(START, step=steps, optimizer_steps=steps)
    return StoredState(weights, {kind: by_kind[kind] for kind in MOMENTS}, counters)


def verify_archives(directory: Path) -> None:
    """Read every file of ``torch.save`` in a checkpoint and compare it with the CRC-32 of its parts, which torch
    does not compare. Raises CheckpointError that names the damaged file."""
    paths = [directory] if directory.is_file() else sorted(directory.rglob("*"))
    for path in paths:
        if path.name == ".metadata":
            with reader_errors(path, "torch.distributed.checkpoint"):
                Checkpoint(path.parent).verify()
        if path.suffix in (".pt", ".bin") and path.is_file():
            verify_archive(path)


def write_distributed(opened: Opened, directory: Path, dtype: torch.dtype, path: Path) -> None:
    """Write a checkpoint of torch.distributed.checkpoint in fp32, with the keys of ``{"model": …, "optimizer": …}`` as
    torch's ``get_state_dict`` returns them, without ``param_groups``. Raises CheckpointError."""
    shapes = tensor_shapes(opened.model)
    blocks: list[Block] = []
    for kind, source in opened.sources.items():
        for name, shape in shapes.items():
            state = f"optimizer.state.{name}"
            key = f"model.{name}" if kind is StateKind.MASTER else f"{state}.{kind.value}"
            blocks.append(block_of(key, shape, (0,) * len(shape), shape, torch.float32, partial(source.read, name)))
            if kind is StateKind.EXP_AVG:
                steps = partial(torch.tensor, float(opened.counters.optimizer_steps))
                blocks.append(block_of(f"{state}.step", (), (), (), torch.float32, steps))
    write_blocks(directory, blocks=blocks, common=None)
