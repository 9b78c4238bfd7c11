"""The tensors of another program's checkpoint under Hugging Face names, and what a file must say of Adam."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kit.addons.importers.stored import StoredState, StoredTensor
from kit.engines.huggingface import encoder_decoder, experts
from kit.engines.huggingface.buffers import is_buffer
from kit.engines.protocol import StateKind, TensorSource
from kit.errors import CheckpointError
from kit.specs.model import ModelSpec
from kit.training.counters import LARGEST

MOMENTS = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
_WRAPPERS = re.compile(r"^(?:module\.)+|(?:^|(?<=\.))_orig_mod\.|(?<=lora_[AB]\.)default\.")
"""Parts of names that DistributedDataParallel, torch.compile and peft (its adapter "default") add in memory."""


def sources(state: StoredState, model: ModelSpec, adapters: bool = False) -> dict[StateKind, TensorSource]:
    """The tensors of each kind under the names on disk of ``model``, or of its adapters."""
    kinds = {StateKind.MASTER: state.weights, **state.moments}
    buffers = {  # they have no moments
        name: StoredTensor(tensor.shape, torch.float32, partial(torch.zeros, tensor.shape))
        for name, tensor in state.weights.items()
        if is_buffer(name)
    }
    return {kind: _Source(None if adapters else model, buffers | dict(found)) for kind, found in kinds.items()}


class _Source(TensorSource):
    """The tensors of one kind under Hugging Face names on disk. One stored tensor is in memory at a time."""

    def __init__(self, model: ModelSpec | None, stored: Mapping[str, StoredTensor]) -> None:
        """``model``: None for adapters, whose names stay."""
        self._model, self._stored = model, {plain_name(name): tensor for name, tensor in stored.items()}
        self._place: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in self._stored.items():
            on_disk = {name: tensor.shape} if model is None else experts.shapes_on_disk(model, name, tensor.shape)
            self._shapes |= on_disk
            self._place |= dict.fromkeys(on_disk, name)
        if model is not None and model.is_encoder_decoder:
            encoder_decoder.drop_copies(self._place)
        if model is not None and model.tied_embeddings:
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


def hyperparameters(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What inspect says of Adam's parameter groups."""
    return [{key: group[key] for key in ("lr", "betas", "eps", "weight_decay") if key in group} for group in groups]


def require_one_step(path: Path, steps: Collection[int]) -> None:
    """Raises CheckpointError if parameters say different step counts of their Adam, or an impossible one."""
    if len(steps) > 1 or any(not 0 <= step <= LARGEST for step in steps):
        raise CheckpointError(f"{path} says {sorted(steps)} steps of one Adam; take another checkpoint")


def plain_name(name: str) -> str:
    """The name of a parameter without the parts that wrappers add."""
    return _WRAPPERS.sub("", name)
