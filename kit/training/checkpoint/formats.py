"""The formats of checkpoints: kit's own and Hugging Face's here, others by packages that register one.

An entry point of the group ``kit.checkpoint_formats`` names a ``Format`` (docs/how-to/add-a-checkpoint-format.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kit.engines.huggingface.models import HfDirectory
from kit.engines.protocol import StateKind, TensorSource
from kit.entry_points import load, registered
from kit.errors import CheckpointError, KitError
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec
from kit.specs.optimizers import OPTIMIZERS
from kit.training.checkpoint.manifest import Checkpoint, written_by_kit
from kit.training.checkpoint.store import write_sources
from kit.training.counters import START, Counters

GROUP = "kit.checkpoint_formats"


@dataclass(frozen=True)
class Found:
    """A checkpoint that a format has recognised."""

    program: str
    """What wrote it, in words."""
    directory: Path
    """The directory or file with the state: perhaps one inside the path that the user gave."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Opened:
    """A checkpoint to convert."""

    model: ModelSpec
    counters: Counters
    sources: Mapping[StateKind, TensorSource]
    """The weights; and both moments of Adam, or no moments."""
    lora: LoraSpec | None = None
    """Set if the weights are adapters."""
    notes: tuple[str, ...] = ()
    chat_template: str | None = None


@dataclass(frozen=True)
class Format:
    """What kit does with the checkpoints of a program. Recognising one opens no tensor and runs no pickle."""

    name: str
    """Value of ``--to``, and of ``format`` in ``kit convert inspect``."""
    looks_for: str
    """The files by which it recognises a directory, for the message where none does."""
    recognise: Callable[[Path], Found | None]
    open: Callable[[Path, Any, str | None], Opened] | None = None
    """(path, what ``recognise`` found there, ``--model`` for a checkpoint that does not say it). Raises KitError for
    damage."""
    write: Callable[[Opened, Path, torch.dtype, Path], None] | None = None
    """(checkpoint with exactly the model's tensors, new directory, dtype of the weights, path of the checkpoint).
    Raises CheckpointError."""
    takes_dtype: bool = False
    """Whether ``--dtype`` may be given; other formats hold fp32."""
    priority: int = 50
    """The lowest that recognises a directory has it."""


def formats() -> dict[str, Format]:
    """Name → format: kit's own and those of installed packages, by priority. What cannot be imported is left out."""
    found = [STEP, HUGGING_FACE]
    for entry in registered(GROUP).values():
        with suppress(KitError):
            found.append(load(entry))
    return {each.name: each for each in sorted(found, key=lambda each: each.priority)}


def recognise(path: Path) -> tuple[Format, Found]:
    """Which program wrote ``path``. Raises CheckpointError if it is missing or no checkpoint of an installed format."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give the directory of a checkpoint")
    known = formats()
    for each in known.values():
        if (found := each.recognise(path)) is not None:
            return each, found
    absent = [f"{entry.name} ({entry.value})" for name, entry in registered(GROUP).items() if name not in known]
    missing = f"; formats that cannot be imported were not tried: {', '.join(absent)}" if absent else ""
    raise CheckpointError(
        f"{path} is not a checkpoint: it has none of {'; '.join(each.looks_for for each in known.values())}{missing}"
    )


def _step(path: Path) -> Found | None:
    """A directory with a manifest of this kit's; those of other versions are another format's."""
    return Found("kit", path) if written_by_kit(path) else None


def open_step(path: Path) -> Opened:
    """A checkpoint of this kit's, whose files have been verified. Raises CheckpointError."""
    checkpoint = Checkpoint(path)
    said = checkpoint.manifest
    checkpoint.verify()
    checkpoint.refuse_unlisted()
    # Other programs' files have places for Adam's state.
    kinds = said.kinds if OPTIMIZERS[said.optimizer].state_of == "adamw" else (StateKind.MASTER,)
    sources = {kind: checkpoint.source(kind) for kind in kinds}
    return Opened(said.model, said.counters, sources, said.lora, chat_template=said.chat_template)


def _open_step(path: Path, found: Found, model: str | None) -> Opened:
    if model is not None:
        raise CheckpointError(f"--model {model}: {path} is a checkpoint of kit, which says its model; omit it")
    return open_step(path)


def _write_step(opened: Opened, directory: Path, dtype: torch.dtype, path: Path) -> None:
    write_sources(directory, opened.model, opened.sources, opened.counters, opened.lora)


def _hugging_face(path: Path) -> Found | None:
    if not (path / "config.json").is_file():
        return None
    program = "Hugging Face Trainer" if (path / "trainer_state.json").is_file() else "Hugging Face model"
    notes = ("optimizer.pt, of one process, is not read: weights only",) if (path / "optimizer.pt").is_file() else ()
    return Found(program, path, notes)


def _open_hugging_face(path: Path, found: Found, model: str | None) -> Opened:
    from kit.specs.catalog import load_model

    if model is not None:
        raise CheckpointError(f"--model {model}: {path} has a config.json, which says its model; omit it")
    return Opened(load_model(str(path)), START, {StateKind.MASTER: HfDirectory(path)})


STEP = Format("step", "manifest.json (kit)", _step, _open_step, _write_step, priority=0)
HUGGING_FACE = Format("hf", "config.json (Hugging Face)", _hugging_face, _open_hugging_face, priority=90)
