"""Reads DeepSpeed's own checkpoint files with the closed-list reader.

DeepSpeed 0.19.8 reads them with ``torch.load(weights_only=False)`` (runtime/checkpoint_engine/
torch_checkpoint_engine.py), which runs code from the file. In all stages and precisions, the files contain tensors,
plain values and the classes below, and no others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from kit.engines import closed_list
from kit.engines.collective import run_collectively, split_over_ranks

_CLASSES = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)


def read_safely(engine: DeepSpeedEngine) -> None:
    """Make ``engine`` load checkpoints with the closed-list reader, whatever checkpoint engine its settings chose."""
    engine.checkpoint_engine.load = _load


def check(directory: Path) -> None:
    """Collective. Raises CheckpointError, on every rank, for a file that the closed-list reader refuses.

    Each rank checks its share of the files, before any rank loads: if one rank stopped during ``load``, the other ranks
    would wait for ever.
    """

    def look() -> None:
        for path in split_over_ranks(sorted(directory.rglob("*.pt"))):
            closed_list.load_restricted(path, _CLASSES, mapped=True)

    run_collectively(True, look, f"reading {directory}")


def _load(path: str, map_location: Any = None) -> Any:
    return closed_list.load_restricted(Path(path), _CLASSES, map_location)
