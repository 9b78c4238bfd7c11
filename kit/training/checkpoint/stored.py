"""A checkpoint as it is stored, whoever wrote it: tensors by name that are read when they are needed, and counters."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kit.engines.huggingface import encoder_decoder, experts
from kit.engines.huggingface.buffers import is_buffer
from kit.engines.protocol import StateKind, TensorSource
from kit.errors import CheckpointError
from kit.specs.model import ModelSpec
from kit.specs.text_files import parse_json, read_text
from kit.training.counters import LARGEST, START, Counters

MOMENTS = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
_WRAPPERS = re.compile(r"^(?:module\.)+|(?:^|(?<=\.))_orig_mod\.|(?<=lora_[AB]\.)default\.")
"""Parts of names that DistributedDataParallel, torch.compile and peft (its adapter "default") add in memory."""


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

    def sources(self, model: ModelSpec, adapters: bool = False) -> dict[StateKind, TensorSource]:
        """The tensors of each kind under the names on disk of ``model``, or of its adapters."""
        kinds = {StateKind.MASTER: self.weights, **self.moments}
        buffers = {  # they have no moments
            name: StoredTensor(tensor.shape, torch.float32, partial(torch.zeros, tensor.shape))
            for name, tensor in self.weights.items()
            if is_buffer(name)
        }
        return {kind: _Source(None if adapters else model, buffers | dict(found)) for kind, found in kinds.items()}


class _Source(TensorSource):
    """The tensors of one kind under Hugging Face names on disk. One stored tensor is in memory at a time."""

    def __init__(self, model: ModelSpec | None, stored: Mapping[str, StoredTensor]) -> None:
        """``model``: None for adapters, whose names stay."""
        found = {plain_name(name): tensor for name, tensor in stored.items()}
        self._model, self._stored = model, found
        self._place = {name: name for name in found}
        self._shapes = {name: tensor.shape for name, tensor in found.items()}
        if model is not None:
            self._place, self._shapes = {}, {}
            for name, tensor in found.items():
                for each, shape in experts.shapes_on_disk(model, name, tensor.shape).items():
                    self._place[each], self._shapes[each] = name, shape
            if model.is_encoder_decoder:
                encoder_decoder.drop_copies(self._place)
            if model.tied_embeddings:
                self._place.pop(model.traits.head_name, None)
        self._held: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def names(self) -> Sequence[str]:
        """Names on disk."""
        return list(self._place)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in the dtype of the checkpoint."""
        place = self._place[name]
        if self._held[0] != place:
            self._held = ("", {})  # frees it before the next one is read
            tensor = self._stored[place].read()
            parts = {name: tensor} if self._model is None else dict(experts.split_experts(self._model, place, tensor))
            self._held = (place, parts)
        return self._held[1][name]


def tagged(directory: Path, file: str) -> list[Path]:
    """``directory``, and the directory in it that its text file ``file`` names, as DeepSpeed's ``latest`` does."""
    latest = directory / file
    if not latest.is_file() or latest.stat().st_size >= 1000:
        return [directory]
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    return [directory, directory / Path(tag or ".").name]


def require_one_step(path: Path, steps: Collection[int]) -> None:
    """Raises CheckpointError if parameters say different step counts of their Adam, or an impossible one."""
    if len(steps) > 1 or any(not 0 <= step <= LARGEST for step in steps):
        raise CheckpointError(f"{path} says {sorted(steps)} steps of one Adam; take another checkpoint")


def plain_name(name: str) -> str:
    """The name of a parameter without the parts that wrappers add."""
    return _WRAPPERS.sub("", name)


def number_of_parameters(tensors: Mapping[str, StoredTensor]) -> int:
    """Elements of all tensors."""
    return sum(math.prod(tensor.shape) for tensor in tensors.values())


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
