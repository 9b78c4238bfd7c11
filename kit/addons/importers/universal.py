"""Reads DeepSpeed's universal checkpoints, which fit every ZeRO stage and world size.

DeepSpeed 0.19.8, checkpoint/ds_to_universal.py, writes for each parameter ``zero/NAME/fp32.pt``, ``exp_avg.pt`` and
``exp_avg_sq.pt``. From stages 1 and 2 each is a dictionary whose ``param`` is the whole tensor, and ``step.pt`` is
beside them; from stage 3 each is the flat tensor, and Adam's step is in ``zero/optimizer_state.pt``. Beside ``zero``
are copies of the model's files, which have the shapes, and, one directory up, ``latest_universal``.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kit.addons.importers import deepspeed
from kit.addons.importers.stored import StoredState, StoredTensor, reader_errors, stored, tagged
from kit.addons.importers.tensors import MOMENTS, one_step, steps_of
from kit.engines.protocol import StateKind
from kit.engines.safe_unpickle import load_safely
from kit.errors import CheckpointError
from kit.specs.text import refuse
from kit.training.counters import START

FILES = {StateKind.MASTER: "fp32.pt", StateKind.EXP_AVG: "exp_avg.pt", StateKind.EXP_AVG_SQ: "exp_avg_sq.pt"}
"""Kind of state → its file, in the directory of each parameter."""


def universal_directory(directory: Path) -> Path | None:
    """``directory`` if it is a universal checkpoint, or the one in it that ``latest_universal`` names."""
    return tagged(directory, "latest_universal", lambda each: any(each.glob(f"zero/*/{FILES[StateKind.MASTER]}")))


def read_universal(directory: Path) -> StoredState:
    """Open a universal checkpoint. Raises CheckpointError for parameters without a file of each kind that others have,
    mixed steps and damaged files."""
    with reader_errors(directory, "ds_to_universal.py"):
        folders = sorted(each for each in (directory / "zero").iterdir() if each.is_dir())
        settings = {} if not (files := deepspeed.deepspeed_files(directory)) else deepspeed.load_file(files[0])
        shapes = {name: tuple(shape) for group in settings.get("param_shapes") or () for name, shape in group.items()}
        found = {
            kind: {
                each.name: _stored(each / file, shapes.get(each.name)) for each in folders if (each / file).is_file()
            }
            for kind, file in FILES.items()
        }
        steps = {int(load_safely(path)) for each in folders if (path := each / "step.pt").is_file()}
        ranks, step = int(settings.get("dp_world_size") or 0), int(settings.get("global_steps") or 0)
        samples = int(settings.get("global_samples") or 0)
    incomplete = {
        f"{directory}/zero/{folder.name} has no {FILES[kind]}; copy the checkpoint again, complete": (
            folder.name not in tensors
        )
        for kind, tensors in found.items()
        for folder in (folders if tensors else ())
    }
    refuse(incomplete, CheckpointError)
    said = one_step(directory, steps or _steps_beside(directory))
    missing = [FILES[kind] for kind in MOMENTS if not found[kind]] or (["step.pt"] if said is None else [])
    taken = 0 if missing else said or 0
    step = max(step, taken)
    counters = dataclasses.replace(START, step=step, samples_seen=samples if step else 0, optimizer_steps=taken)
    notes = (f"without {' and '.join(missing)}: weights only",) if missing else ()
    moments = {} if missing else {kind: found[kind] for kind in MOMENTS}
    layout: dict[str, int | str] = {"written by world_size": ranks} if ranks else {}
    return StoredState(found[StateKind.MASTER], moments, counters, layout, notes=notes)


def _steps_beside(directory: Path) -> set[int]:
    """Adam's step count from the optimizer's common state, where parameters have none of their own."""
    path = directory / "zero" / "optimizer_state.pt"
    if not path.is_file():
        return set()
    with reader_errors(path, "ds_to_universal.py"):
        loaded = deepspeed.load_file(path)
        state = (loaded.get("optimizer_state_dict") or {}).get("state")
        return steps_of({"state": state, "param_groups": loaded.get("param_groups")})


def _stored(path: Path, shape: tuple[int, ...] | None) -> StoredTensor:
    with reader_errors(path, "ds_to_universal.py"):
        return stored(partial(_param, path, shape))


def _param(path: Path, shape: tuple[int, ...] | None) -> torch.Tensor:
    """The whole tensor; ``shape``: None where no copy of the model's files says it."""
    loaded: Any = load_safely(path, mapped=True)
    tensor = loaded["param"] if isinstance(loaded, dict) else loaded
    if not isinstance(tensor, torch.Tensor):
        raise TypeError("param is not a tensor")
    return tensor.detach() if shape is None else tensor.detach().reshape(shape)
