"""What ``kit convert inspect`` says of a directory or file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.errors import CheckpointError
from kit.specs.text_files import parse_json, read_text


@dataclass(frozen=True)
class Inspected:
    """A checkpoint, whoever wrote it."""

    path: str
    program: str
    """The program that wrote it, in words."""
    format: str
    """kit's name of the format."""
    step: int | None
    """None: the checkpoint does not say it."""
    optimizer_steps: int | None
    samples_seen: int | None
    layout: dict[str, int | str]
    """World size, ZeRO stage, TP, PP, precision: what the checkpoint says."""
    dtypes: list[str]
    """Dtypes of the stored weights."""
    parameters: int | None
    """Elements of all weights."""
    tensors: int | None
    adam: bool
    """Whether Adam's moments are there."""
    hyperparameters: list[dict[str, object]]
    """Learning rate, betas, eps and weight decay of Adam's parameter groups."""
    model: str | None
    notes: list[str]
    can: list[str]
    """What to do with it: commands."""

    def __str__(self) -> str:
        counters = (("step", self.step), ("of Adam", self.optimizer_steps), ("samples", self.samples_seen))
        weights = f"{self.parameters or 0:,} in {self.tensors} tensors, {', '.join(self.dtypes)}"
        said = [
            ("program", self.program),
            ("model", self.model or "not said"),
            ("step", ", ".join(f"{word} {n}" for word, n in counters if n is not None) or "not said"),
            ("layout", ", ".join(f"{key}={value}" for key, value in self.layout.items()) or "not said"),
            *[("weights", weights)] * (self.parameters is not None),
            ("Adam's state", "yes" if self.adam else "no"),
            *(("", ", ".join(f"{key} {value}" for key, value in group.items())) for group in self.hyperparameters),
            *(("note", note) for note in self.notes),
            *(("do", command) for command in self.can),
        ]
        return "\n".join([self.path, *(f"  {name:<13} {value}" for name, value in said)])


def inspected(path: Path) -> Inspected:
    """What ``path`` is. Raises CheckpointError if it is no checkpoint that kit knows, or damaged."""
    from kit.addons.importers.readers import readers
    from kit.addons.importers.stored import state_of
    from kit.training.checkpoint.formats import formats, recognise

    known, found = recognise(path)
    state = state_of(known, found)
    counters = state.counters
    model = "" if (path / "config.json").is_file() or state.model else " --model MODEL"
    convert = f"kit convert model {path} --to {{}} --out DIRECTORY{model}"
    can = [] if known.open is None else [convert.format("step") + ", then kit train RUN --resume DIRECTORY"]
    if known.name == "step":
        others = ["hf", *(name for name, each in formats().items() if each.write is not None and name != "step")]
        can = [f"kit train RUN --resume {path}", *map(convert.format, others)]
    return Inspected(
        path=str(path),
        program=found.program,
        format=known.name,
        step=counters.step or None,
        optimizer_steps=counters.optimizer_steps or None,
        samples_seen=counters.samples_seen or None,
        layout=dict(state.layout),
        dtypes=sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.weights.values()}),
        parameters=sum(math.prod(tensor.shape) for tensor in state.weights.values()) if state.weights else None,
        tensors=len(state.weights) or None,
        adam=bool(state.moments) or state.moments_elsewhere,
        hyperparameters=[dict(group) for group in state.adam],
        model=state.model or _model(path),
        notes=[*(readers(found.directory) if known.name == "hf" else []), *found.notes, *state.notes],
        can=can,
    )


_PEFT_KEYS = ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules")


def _model(path: Path) -> str | None:
    """The model's type and architecture by config.json, or what peft says of its adapters."""
    for name, keys in (("config.json", ("model_type", "architectures")), ("adapter_config.json", _PEFT_KEYS)):
        if (path / name).is_file():
            try:
                config: dict[str, Any] = parse_json(read_text(path / name))
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path / name} is damaged ({error}); copy the checkpoint again") from error
            return ", ".join(f"{key} {json.dumps(config[key])}" for key in keys if key in config)
    return None
