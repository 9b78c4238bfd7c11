"""A checkpoint as it is stored, whoever wrote it: tensors by name that are read when they are needed, and counters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kit.engines.protocol import StateKind
from kit.errors import CheckpointError
from kit.specs.text_files import parse_json, read_text
from kit.training.counters import START, Counters


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    """Returns the whole tensor, on the CPU."""


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


@contextmanager
def described(path: Path, program: str) -> Iterator[None]:
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
