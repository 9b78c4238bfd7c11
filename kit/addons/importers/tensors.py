"""The tensors of another program's checkpoint under Hugging Face names, and what a file must say of Adam."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kit.addons.importers.stored import StoredState, StoredTensor, zeros
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
    buffers = {name: zeros(tensor.shape) for name, tensor in state.weights.items() if is_buffer(name)}
    return {kind: _source(None if adapters else model, buffers | dict(found)) for kind, found in kinds.items()}


class HeldSource(TensorSource):
    """Tensors under Hugging Face names, several of which may be in one stored place; one place is in memory at a
    time."""

    def __init__(
        self,
        place: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
        parts: Callable[[str], Mapping[str, torch.Tensor]],
    ) -> None:
        """``place``: name → where it is stored. ``parts``: reads a place; its tensors by their names, on the CPU, in
        the dtype of the checkpoint."""
        self._place, self._shapes, self._parts = place, shapes, parts
        self._held: tuple[str, Mapping[str, torch.Tensor]] = ("", {})

    def names(self) -> Sequence[str]:
        """In this order, each place is read once."""
        return list(self._place)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor."""
        place = self._place[name]
        if self._held[0] != place:
            self._held = ("", {})  # frees it before the next one is read
            self._held = (place, self._parts(place))
        return self._held[1][name]


def _source(model: ModelSpec | None, found: Mapping[str, StoredTensor]) -> HeldSource:
    """The tensors of one kind. ``model``: None for adapters, whose names stay."""
    stored = {plain_name(name): tensor for name, tensor in found.items()}
    on_disk = {
        name: {name: tensor.shape} if model is None else experts.shapes_on_disk(model, name, tensor.shape)
        for name, tensor in stored.items()
    }
    place = {each: name for name, of_name in on_disk.items() for each in of_name}
    shapes = {each: shape for of_name in on_disk.values() for each, shape in of_name.items()}
    if model is not None and model.is_encoder_decoder:
        encoder_decoder.drop_copies(place)
    if model is not None and model.tied_embeddings:
        place.pop(model.traits.head_name, None)

    def parts(name: str) -> Mapping[str, torch.Tensor]:
        tensor = stored[name].read()
        return {name: tensor} if model is None else dict(experts.split_experts(model, name, tensor))

    return HeldSource(place, shapes, parts)


def hyperparameters(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What inspect says of Adam's parameter groups."""
    return [{key: group[key] for key in ("lr", "betas", "eps", "weight_decay") if key in group} for group in groups]


def steps_of(optimizer: Mapping[str, Any]) -> set[int]:
    """Adam's step counts by a ``state_dict`` of torch's optimizers: each parameter's, and each group's that has any."""
    said = [*(optimizer.get("state") or {}).values(), *(optimizer.get("param_groups") or ())]
    return {int(each["step"]) for each in said if each.get("step") is not None and each.get("params", True)}


def one_step(path: Path, steps: Iterable[int | None]) -> int | None:
    """Adam's step count; None where nothing says it. Raises CheckpointError if parameters or ranks say different ones,
    or an impossible one."""
    found = set(steps)
    if len(found) > 1 or not all(0 <= (step or 0) <= LARGEST for step in found):
        said = " and ".join(map(str, sorted(step or 0 for step in found)))
        raise CheckpointError(
            f"{path} has files whose Adam made {said} steps: ranks wrote different steps into it, or it is "
            f"damaged; take another checkpoint"
        )
    return next(iter(found), None)


def plain_name(name: str) -> str:
    """The name of a parameter without the parts that wrappers add."""
    return _WRAPPERS.sub("", name)
