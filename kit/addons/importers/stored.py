"""A checkpoint as it is stored, whoever wrote it: tensors by name that are read when they are needed, and counters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kit.engines.huggingface.models import weight_files
from kit.engines.io.sharded_safetensors import SafetensorsSource
from kit.engines.protocol import StateKind
from kit.errors import CheckpointError
from kit.specs.text_files import parse_json, read_text
from kit.training.checkpoint.formats import HUGGING_FACE, STEP, Format, Found
from kit.training.checkpoint.manifest import Checkpoint
from kit.training.counters import START, Counters


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    """Returns the whole tensor, on the CPU."""


def stored(read: Callable[[], torch.Tensor]) -> StoredTensor:
    """The tensor that ``read`` returns; it is called once now, for shape and dtype."""
    tensor = read()
    return StoredTensor(tuple(tensor.shape), tensor.dtype, read)


def zeros(shape: tuple[int, ...]) -> StoredTensor:
    """What stands for the moments of a tensor that has none."""
    return StoredTensor(shape, torch.float32, partial(torch.zeros, shape))


@dataclass(frozen=True)
class StoredState:
    """The tensors of a checkpoint, under the names of the modules of the program that wrote it."""

    weights: Mapping[str, StoredTensor]
    """fp32 master weights where the checkpoint has them, the model's weights otherwise."""
    moments: Mapping[StateKind, Mapping[str, StoredTensor]] = field(default_factory=dict)
    """Both moments of Adam, or none."""
    counters: Counters = START
    layout: Mapping[str, int | str] = field(default_factory=dict)
    """World size, ZeRO stage, TP, PP, …"""
    adam: Sequence[Mapping[str, Any]] = ()
    """Learning rate, betas, eps and weight decay of each parameter group."""
    notes: tuple[str, ...] = ()
    moments_elsewhere: bool = False
    """Whether files of another reader than this one hold Adam's moments, as with Megatron's."""
    model: str | None = None
    """Name of the model, where the checkpoint says it."""


@dataclass(frozen=True)
class FoundState(Found):
    """A checkpoint whose tensors are read one at a time, for ``kit convert inspect`` and to convert them."""

    state: Callable[[], StoredState] = field(kw_only=True)
    """Opens it; reads everything but the elements of tensors. Raises CheckpointError."""


def found_in(directory: Path | None, program: str, state: Callable[[Path], StoredState]) -> FoundState | None:
    """A checkpoint of ``program`` in ``directory``, which ``state`` opens; None without one."""
    return None if directory is None else FoundState(program, directory, state=partial(state, directory))


def read_weights(files: Mapping[str, Path]) -> StoredState:
    """Open safetensors or ``.bin`` files; ``files``: name of a tensor → its file. Raises CheckpointError."""
    return StoredState(tensors_of(SafetensorsSource(files)))


def tensors_of(source: SafetensorsSource) -> dict[str, StoredTensor]:
    """Their headers are read."""
    return {name: stored(partial(source.read, name)) for name in source.names()}


def tagged(directory: Path, file: str, holds: Callable[[Path], bool], name: Callable[[str], str] = str) -> Path | None:
    """``directory`` if it ``holds`` a checkpoint, or else the directory in it that its text file ``file`` names, as
    DeepSpeed's ``latest`` does; None if neither holds one. ``name``: the directory's name by these words."""
    places, latest = [directory], directory / file
    if latest.is_file() and latest.stat().st_size < 1000:
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()[:200]
        places.append(directory / Path(name(tag) or ".").name)
    return next((each for each in places if holds(each)), None)


@contextmanager
def reader_errors(path: Path, program: str) -> Iterator[None]:
    """Turns the errors of unexpected content into a CheckpointError that names the file and the program."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OSError, RuntimeError, OverflowError) as error:
        words = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path} is not what {program} writes ({type(error).__name__}: {words}); copy the checkpoint again"
        ) from error


def with_trainer_state(state: StoredState, directory: Path) -> StoredState:
    """``state`` with the step and the tokens of ``trainer_state.json``, which transformers' Trainer writes beside it.

    Raises CheckpointError if the file is damaged, or is of another step.
    """
    path = directory / "trainer_state.json"
    if not path.is_file():
        return state
    with reader_errors(path, "transformers' Trainer"):
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


def state_of(known: Format, found: Found) -> StoredState:
    """What is stored in a checkpoint of any format; of one that reads no state nothing is known."""
    if isinstance(found, FoundState):
        return found.state()
    return _OWN[known.name](found.directory) if known.name in _OWN else StoredState({})


def _step(path: Path) -> StoredState:
    checkpoint = Checkpoint(path)
    said = checkpoint.manifest
    found = {kind: tensors_of(checkpoint.source(kind)) for kind in said.kinds}
    notes = (f"adapters of rank {said.lora.rank}",) if said.lora else ()
    layout: dict[str, int | str] = {"world_size": said.world_size} if said.plan_hash else {}
    return StoredState(found.pop(StateKind.MASTER), found, said.counters, layout, notes=notes, model=said.model.name)


def _hugging_face(path: Path) -> StoredState:
    return with_trainer_state(read_weights(weight_files(path)), path)


_OWN = {STEP.name: _step, HUGGING_FACE.name: _hugging_face}
"""The core's formats, which it converts without a ``StoredState``."""
