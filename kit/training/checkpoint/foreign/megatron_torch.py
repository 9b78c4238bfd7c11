"""Opens Megatron-LM's old ``torch`` format (kit/engines/megatron/checkpoint/torch_format.py)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from kit.training.checkpoint.counters import START
from kit.training.checkpoint.foreign.source import ForeignState, described

if TYPE_CHECKING:
    from kit.engines.megatron.checkpoint.torch_format import TorchFormat


def open_torch_format(directory: Path) -> TorchFormat:
    """Open a checkpoint. Reads everything but the elements of tensors. Raises CheckpointError."""
    from kit.engines.megatron.checkpoint.torch_format import TorchFormat

    with described(directory, "Megatron-LM"):
        return TorchFormat(directory)


def torch_format_state(found: TorchFormat) -> ForeignState:
    """What a checkpoint says of itself; only the model's weight map can say whose its tensors are."""
    with described(found.directory, "Megatron-LM"):
        samples = int(found.arguments.get("consumed_train_samples") or 0)
        counters = dataclasses.replace(
            START,
            step=found.iteration,
            samples_seen=samples if found.iteration else 0,
            optimizer_steps=found.optimizer_steps,
        )
    layout: dict[str, int | str] = {"tp": found.tp, "pp": found.pp}
    return ForeignState({}, {}, counters, layout, found.hyperparameters, found.notes, moments_elsewhere=not found.notes)
