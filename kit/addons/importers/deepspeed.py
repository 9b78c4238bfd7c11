"""Reads the checkpoints that DeepSpeed's engine saves, of ZeRO 0 to 3, without DeepSpeed and without running a pickle.

DeepSpeed 0.19.8, runtime/engine.py (``_save_checkpoint``, ``_save_zero_checkpoint``), writes into ``global_stepN``:

    mp_rank_00_model_states.pt                          stage 0 to 2: names, shapes, the model's weights, counters
    zero_pp_rank_R_mp_rank_00_model_states.pt           stage 3: the same of each rank, without weights
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    rank R's part of the flat fp32 weights and of Adam's moments

Stages 1 and 2 cut each flat parameter group into equal parts; ``param_slice_mappings`` says where a parameter is in a
rank's part. Stage 3 cuts each parameter: rank R has elements R·c … (R+1)·c-1, c = ⌈elements / ranks⌉, of all parameters
one behind another (utils/zero_to_fp32.py). All tensors are mapped into memory and read when they are needed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kit.addons.importers.opaque import Opaque
from kit.addons.importers.stored import StoredState, StoredTensor, reader_errors, stored, tagged, zeros
from kit.addons.importers.tensors import MOMENTS, hyperparameters, one_step, steps_of
from kit.engines.protocol import StateKind
from kit.engines.safe_unpickle import load_safely
from kit.errors import CheckpointError
from kit.specs.text import refuse
from kit.training.counters import START

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


class _Fragment(Opaque):
    """Stands for DeepSpeed's ``fragment_address``: where a parameter is stored in a rank's part of a flat group."""

    numel: int
    start: int

    def __setstate__(self, state: Any) -> None:
        self.numel, self.start = int(state["numel"]), int(state["start"])


_CLASSES = [
    (_Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Opaque, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Opaque, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]
"""The classes of DeepSpeed's files, and what stands for each."""


@dataclass(frozen=True)
class _RankState:
    """One rank's flat groups, of each kind of state."""

    stage: int
    groups: Mapping[StateKind, list[torch.Tensor]]
    steps: int | None
    adam: list[dict[str, Any]]
    mappings: list[dict[str, _Fragment]] | None


def deepspeed_files(directory: Path) -> list[Path]:
    """The files of a DeepSpeed checkpoint in ``directory`` itself; empty if it is none."""
    found = [path for path in directory.iterdir() if path.name.endswith(("_optim_states.pt", "_model_states.pt"))]
    return sorted(found, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)])


def deepspeed_directory(directory: Path) -> Path | None:
    """``directory`` if it is a DeepSpeed checkpoint, or the one in it that ``latest`` names; otherwise None."""
    return tagged(directory, "latest", lambda each: each.is_dir() and bool(deepspeed_files(each)))


def read_deepspeed(directory: Path) -> StoredState:
    """Open a checkpoint. Reads everything but the elements of tensors. Raises CheckpointError for missing ranks, mixed
    steps, tensor or pipeline parallelism, and damaged files."""
    with reader_errors(directory, "DeepSpeed"):
        return _read(directory)


def _read(directory: Path) -> StoredState:
    models = _by_rank(directory, _MODEL)
    first = load_file(next(iter(models.values())))
    stage3 = any(path.name.startswith("zero_") for path in models.values())
    ranks, step = int(first["dp_world_size"]), int(first["global_steps"])
    if stage3:
        _complete(directory, set(models), ranks, "model_states")
    states = [first, *(load_file(path) for path in list(models.values())[1:])]
    mixed = {
        f"{directory} has files of step {step} and of step {state['global_steps']}: ranks wrote different steps into "
        f"it; take another checkpoint": int(state["global_steps"]) != step
        for state in states
    }
    refuse(mixed, CheckpointError)
    counters = dataclasses.replace(START, step=step, samples_seen=max(0, int(first.get("global_samples") or 0)))
    layout: dict[str, int | str] = {"world_size": ranks * int(first.get("mp_world_size") or 1), "dp": ranks}
    own = {name: stored(value.detach) for name, value in (first["module"] or {}).items() if value.is_floating_point()}
    optimizer = (
        _by_rank(directory, _OPTIMIZER) if any("_optim_" in path.name for path in deepspeed_files(directory)) else {}
    )
    if not optimizer:
        if stage3:
            raise CheckpointError(
                f"{directory} has no *_optim_states.pt, which hold the weights of ZeRO-3; copy the checkpoint again"
            )
        shared = set(first.get("shared_params") or {})
        weights = {name: tensor for name, tensor in own.items() if name not in shared}
        return StoredState(weights, {}, counters, layout | {"zero_stage": 0}, notes=("no file of an optimizer",))
    _complete(directory, set(optimizer), ranks, "optim_states")
    ranks_states = [_rank_state(path) for path in optimizer.values()]
    stage = ranks_states[-1].stage
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in first["param_shapes"]]
    flat = {name: shape for group in shapes for name, shape in group.items()}
    kinds = set.intersection(*(set(state.groups) for state in ranks_states))
    steps = one_step(directory, (state.steps for state in ranks_states))
    missing = [kind.value for kind in MOMENTS if kind not in kinds] or ["step"] * (steps is None)
    frozen = _frozen(states, own, flat)
    whole: dict[StateKind, dict[str, StoredTensor]] = {}
    for kind in (StateKind.MASTER, *(() if missing else MOMENTS)):
        groups = [state.groups[kind] for state in ranks_states]
        parts = _cut_parameters(shapes, groups) if stage == 3 else _cut_groups(shapes, groups, ranks_states)
        others = frozen if kind is StateKind.MASTER else {name: zeros(tensor.shape) for name, tensor in frozen.items()}
        whole[kind] = {name: _joined(name, flat[name], parts[name]) for name in flat} | others
    buffers = {name: own[name] for name in first.get("buffer_names") or () if name in own}
    weights = whole.pop(StateKind.MASTER) | buffers
    counters = dataclasses.replace(counters, optimizer_steps=min(steps or 0, step) if whole else 0)
    layout |= {"zero_stage": stage, "precision": _precision(first.get("ds_config"))}
    notes = {
        f"Adam's {' and '.join(missing)} is missing: weights only": missing,
        f"{len(frozen)} tensors were frozen and have no moments; zeros stand for these": frozen,
        f"Adam made {steps} of {step} steps: check that all files are of one checkpoint": (
            steps not in (None, step - int(first.get("skipped_steps") or 0))
        ),
    }
    said = tuple(note for note, holds in notes.items() if holds)
    return StoredState(weights, whole, counters, layout, ranks_states[0].adam, said)


def load_file(path: Path) -> Any:
    """Content of one file, with DeepSpeed's own classes replaced. Raises CheckpointError."""
    return load_safely(path, _CLASSES, mapped=True)


def _by_rank(directory: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Data-parallel rank → file. Raises CheckpointError for tensor and pipeline parallelism."""
    found = [(match, path) for path in deepspeed_files(directory) if (match := pattern.fullmatch(path.name))]
    kind, tp = "model_states" if pattern is _MODEL else "optim_states", {match[2] for match, _ in found}
    reasons = {
        f"{directory} has no mp_rank_…_{kind}.pt that kit reads: pipeline modules and experts of DeepSpeed's own have "
        f"other files; convert it with DeepSpeed's ds_to_universal.py and give its output": not found,
        f"{directory} has {len(tp)} model-parallel ranks (mp_rank_00 …): kit reads data parallelism alone; convert it "
        f"with DeepSpeed's ds_to_universal.py and give its output": any(map(int, tp)),
    }
    refuse(reasons, CheckpointError)
    return {int(match[1] or 0): path for match, path in sorted(found, key=lambda each: int(each[0][1] or 0))}


def _complete(directory: Path, present: set[int], ranks: int, kind: str) -> None:
    missing = sorted(set(range(ranks)) - present)
    if missing or len(present) != ranks:
        named = f"rank {missing[0]} is missing" if missing else f"it has files of {len(present)}"
        raise CheckpointError(
            f"{directory} was written by {ranks} ranks and {named} (zero_pp_rank_…_{kind}.pt); copy the checkpoint "
            f"again, from every node"
        )


def _rank_state(path: Path) -> _RankState:
    with reader_errors(path, "DeepSpeed"):
        loaded = load_file(path)["optimizer_state_dict"]
        stage = int(loaded.get("zero_stage", 1))  # BF16_Optimizer, of stage 1, does not say it
        masters = loaded["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
        adam = loaded.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state") or {}
        if not isinstance(adam, dict):
            raise CheckpointError(
                f"{path} is an elastic checkpoint of DeepSpeed, which kit does not read; save without it"
            )
        state, param_groups = adam.get("state") or {}, adam.get("param_groups") or []
        moments = {kind: [state.get(n, {}).get(kind.value) for n in range(len(masters))] for kind in MOMENTS}
        incomplete = {
            f"{path} has {kind.value} of some parameter groups only; take another checkpoint": (
                len({each is None for each in values}) > 1
            )
            for kind, values in moments.items()
        }
        refuse(incomplete, CheckpointError)
        whole = {kind: values for kind, values in moments.items() if all(each is not None for each in values)}
        found = {StateKind.MASTER: masters, **whole}
        groups = {kind: [tensor.detach().flatten() for tensor in values] for kind, values in found.items()}
        sizes = [{tensor.numel() for tensor in of_kinds} for of_kinds in zip(*groups.values(), strict=True)]
        uneven = {
            f"{path}: sizes of weights and moments differ in group {number}; copy it again": len(of_group) > 1
            for number, of_group in enumerate(sizes)
        }
        refuse(uneven, CheckpointError)
        steps = one_step(path, steps_of(adam))
        mappings = loaded.get("param_slice_mappings")
        return _RankState(stage, groups, steps, hyperparameters(param_groups), mappings)


_Shapes = Sequence[Mapping[str, Sequence[int]]]
"""Name → shape of the parameters of each flat group."""
_Flat = Sequence[Sequence[torch.Tensor]]
"""The flat groups of each rank."""


def _cut_groups(shapes: _Shapes, flat: _Flat, ranks: Sequence[_RankState]) -> dict[str, list[torch.Tensor]]:
    """Stages 1 and 2: the parts of each parameter in the order of its elements."""
    found: dict[str, list[torch.Tensor]] = {name: [] for group in shapes for name in group}
    for group, of_group in enumerate(shapes):
        own, at = [of_rank[group] for of_rank in flat], 0
        if all(state.mappings is not None for state in ranks):
            for tensor, state in zip(own, ranks, strict=True):
                for name, where in (state.mappings or [])[group].items():
                    found[name] += _stretch([tensor], where.start, where.numel)
            continue
        # Versions before 0.8 do not say it: parameters follow each other, and the group is padded at its end.
        for name, shape in of_group.items():
            found[name] = _stretch(own, at, math.prod(shape))
            at += math.prod(shape)
    return found


def _cut_parameters(shapes: _Shapes, flat: _Flat) -> dict[str, list[torch.Tensor]]:
    """Stage 3: the parts of each parameter in the order of its elements. A rank's part may cross flat groups."""
    found, at = {}, 0
    for name, shape in ((name, shape) for of_group in shapes for name, shape in of_group.items()):
        size, part = math.prod(shape), -(-math.prod(shape) // len(flat))
        lengths = (min(part, max(0, size - rank * part)) for rank in range(len(flat)))
        found[name] = [each for own, length in zip(flat, lengths, strict=True) for each in _stretch(own, at, length)]
        at += part
    return found


def _stretch(tensors: Sequence[torch.Tensor], start: int, length: int) -> list[torch.Tensor]:
    """Elements from ``start`` on of flat tensors that lie one behind another, as views. Raises ValueError if there are
    not so many."""
    held = sum(tensor.numel() for tensor in tensors)
    if not 0 <= start <= start + length <= held:
        raise ValueError(f"elements {start} to {start + length} of {held}")
    found = []
    for tensor in tensors:
        found.append(tensor[max(0, start) : max(0, start + length)])
        start -= tensor.numel()
    return [each for each in found if each.numel()]


def _joined(name: str, shape: tuple[int, ...], parts: Sequence[torch.Tensor]) -> StoredTensor:
    """The whole parameter. Raises CheckpointError unless its parts have as many elements as its shape."""
    if (held := sum(part.numel() for part in parts)) != math.prod(shape):
        raise CheckpointError(
            f"parameter {name} of shape {list(shape)} has {held} elements in the files of all ranks; they belong to "
            f"different checkpoints: copy it again"
        )
    return StoredTensor(shape, torch.float32, lambda: torch.cat(list(parts)).reshape(shape))


def _frozen(
    states: list[Mapping[str, Any]], own: Mapping[str, StoredTensor], trained: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """The parameters without gradients. Stage 3 has a part of each in every rank's file."""
    shapes = states[0].get("frozen_param_shapes") or {}
    found = {}
    for name, shape in shapes.items():
        if name in own and own[name].shape == tuple(shape):
            found[name] = own[name]
        elif name not in trained:
            parts = [state["frozen_param_fragments"][name].flatten() for state in states]
            whole = torch.cat(parts)[: math.prod(shape)].reshape(tuple(shape))
            found[name] = stored(whole.detach)
    return found


def _precision(config: Any) -> str:
    """The precision of the computation, from the ds_config in the checkpoint."""
    sections = {name: config.get(name) for name in ("bf16", "fp16")} if isinstance(config, dict) else {}
    on = (name for name, section in sections.items() if isinstance(section, dict) and section.get("enabled") is True)
    return next(on, "fp32")
