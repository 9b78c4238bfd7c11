"""Recognises, opens and writes Megatron-LM's checkpoints: torch_dist, and the old ``torch`` format."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from kit.addons.importers import torch_dist
from kit.addons.importers.megatron import offline
from kit.addons.importers.megatron.names import PREFIXES
from kit.addons.importers.megatron.resumed import values_to_resume
from kit.addons.importers.megatron.torch_format import TorchFormat
from kit.addons.importers.model_of import adapters_of_run, model_of, plan_of_run
from kit.addons.importers.stored import FoundState, StoredState, found_in, tagged
from kit.addons.importers.tensors import MOMENTS
from kit.addons.importers.torch_dcp import verify_archives
from kit.engines.protocol import StateKind
from kit.errors import CheckpointError
from kit.training.checkpoint.formats import Opened
from kit.training.counters import LARGEST, START

TRACKER = "latest_checkpointed_iteration.txt"
"""File in which Megatron-LM looks for the newest checkpoint of a directory (megatron/training/checkpointing.py)."""


def recognise_megatron(path: Path) -> FoundState | None:
    """A torch_dist checkpoint, or a directory whose newest one is."""
    directory = torch_dist_directory(path)
    if directory is None or not any((directory / name).exists() for name in ("common.pt", "metadata.json")):
        return None
    return found_in(directory, "Megatron: torch_dist", _state)


def torch_dist_directory(path: Path) -> Path | None:
    """The directory with torch.distributed's files: ``path``, or Megatron-LM's newest checkpoint in it; None if there
    is none."""
    return tagged(path, TRACKER, lambda each: (each / ".metadata").is_file(), _folder)


def _folder(newest: str) -> str:
    return f"iter_{int(newest):07d}" if newest.isdecimal() else newest


def _state(directory: Path) -> StoredState:
    checkpoint = torch_dist.Checkpoint(directory)
    weights = {key: tensor for key, tensor in checkpoint.stored().items() if not key.startswith("optimizer.")}
    said = checkpoint.common().get("iteration"), checkpoint.optimizer_steps()
    iteration, steps = (value if type(value) is int and 0 <= value < 1 << 62 else 0 for value in said)
    counters = dataclasses.replace(START, step=max(iteration, steps), optimizer_steps=steps)
    return StoredState(weights, {}, counters, moments_elsewhere=_has_moments(checkpoint))


def _has_moments(checkpoint: torch_dist.Checkpoint) -> bool:
    return all(any(key.startswith(PREFIXES[kind]) for key in checkpoint.tensors) for kind in MOMENTS)


def open_megatron(path: Path, found: FoundState, model: str | None) -> Opened:
    """Open a torch_dist checkpoint. Raises CheckpointError."""
    spec, lora = model_of(path, model), adapters_of_run(path, model)
    checkpoint = torch_dist.Checkpoint(found.directory)
    checkpoint.verify()
    iteration, steps = checkpoint.common().get("iteration", 0), checkpoint.optimizer_steps()
    # Of moments of unknown age Adam would correct the bias as if they were new.
    adam = steps is not None and _has_moments(checkpoint) and checkpoint.optimizer() == "adamw"
    kinds = (StateKind.MASTER, *MOMENTS) if adam else (StateKind.MASTER,)
    if type(iteration) is not int or not 0 <= iteration <= LARGEST or not 0 <= (steps or 0) <= LARGEST:
        raise CheckpointError(
            f"{path} says iteration={str(iteration)[:40]} and {str(steps)[:40]} steps of its optimizer, which must "
            f"be whole numbers, 0 or more; give another checkpoint"
        )
    step = max(iteration, steps or 0)  # a missing iteration counts as 0
    counters = dataclasses.replace(START, step=step, optimizer_steps=steps or 0)
    sources = {kind: offline.source_of(checkpoint, kind, spec, lora) for kind in kinds}
    return Opened(spec, counters, sources, lora)


def write_megatron(opened: Opened, directory: Path, dtype: torch.dtype, path: Path) -> None:
    """Write a directory that Megatron-LM loads: ``release`` for weights only, ``iter_…`` with optimizer state.

    Raises CheckpointError.
    """
    counters = opened.counters
    common: dict[str, object] = {"checkpoint_version": 3.0, "iteration": counters.step}
    name, newest = "release", "release"
    if len(opened.sources) > 1:
        name, newest = f"iter_{counters.step:07d}", str(counters.step)
        common |= values_to_resume(opened.model, counters, plan_of_run(path))
    (directory / name).mkdir(exist_ok=True)

    offline.write_checkpoint(directory / name, opened.model, opened.sources, dtype, common)
    (directory / TRACKER).write_text(newest, encoding="utf-8")


def recognise_torch_format(path: Path) -> FoundState | None:
    """A checkpoint of the old format, or a directory whose newest one is."""
    old = tagged(path, TRACKER, lambda each: any(each.glob("mp_rank_*/model_optim_rng.pt")), _folder)
    return found_in(old, "Megatron-LM: old torch format", _torch_state)


def open_old(path: Path, found: FoundState, model: str | None) -> Opened:
    """Open a checkpoint of the old format. Raises CheckpointError."""
    verify_archives(found.directory)
    spec, old = model_of(path, model), TorchFormat(found.directory)
    return Opened(spec, old.counters, old.sources(spec), notes=old.notes)


def _torch_state(directory: Path) -> StoredState:
    """What a checkpoint says of itself; only the model's weight map can say whose its tensors are."""
    old = TorchFormat(directory)
    layout: dict[str, int | str] = {"tp": old.tp, "pp": old.pp}
    return StoredState({}, {}, old.counters, layout, old.hyperparameters, old.notes, moments_elsewhere=not old.notes)
