"""Says which program wrote a checkpoint, and opens it. Runs nothing: pickles are read by the closed list."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kit.engines.huggingface.models import weight_files
from kit.engines.io.sharded_safetensors import file_names
from kit.errors import CheckpointError
from kit.specs.text_files import parse_json, read_text
from kit.training.checkpoint.engine_checkpoint import MANIFEST, STATE, read_manifest
from kit.training.checkpoint.exchange import ExchangeCheckpoint, is_exchange
from kit.training.checkpoint.foreign import deepspeed, torch_dcp, torchtitan, universal
from kit.training.checkpoint.foreign.megatron_torch import open_torch_format, torch_format_state
from kit.training.checkpoint.foreign.readers import readers
from kit.training.checkpoint.foreign.source import ForeignState, StoredTensor, number_of_parameters
from kit.training.checkpoint.inspected import Inspected

TRACKER = "latest_checkpointed_iteration.txt"
"""File in which Megatron-LM looks for the newest checkpoint of a directory (megatron/training/checkpointing.py)."""


@dataclass(frozen=True)
class Recognised:
    """The program of a checkpoint, and a function that opens it."""

    program: str
    format: str
    """exchange, native, deepspeed, universal, megatron, megatron-old, dcp, peft, hf or file."""
    directory: Path
    """The directory or file with the state: perhaps one inside the path that the user gave."""
    open: Callable[[], ForeignState] | None
    """None: kit knows the format and does not read it."""
    notes: tuple[str, ...] = ()


def recognise(path: Path) -> Recognised:
    """Which program wrote ``path``. Raises CheckpointError if it is missing or no checkpoint that kit knows."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give the directory of a checkpoint")
    if path.is_file():
        return Recognised(
            "one file of tensors", "file", path, lambda: torch_dcp.read_weights(dict.fromkeys(file_names(path), path))
        )
    for rule in (_kit, _universal, _deepspeed, _distributed, _megatron_old, _peft, _hugging_face):
        if (found := rule(path)) is not None:
            return found
    raise CheckpointError(
        f"{path} is not a checkpoint: neither exchange.json nor config.json (Hugging Face) nor .metadata or {TRACKER} "
        f"(Megatron, torch) nor *_model_states.pt (DeepSpeed) nor adapter_config.json (peft) is in it"
    )


def _kit(path: Path) -> Recognised | None:
    if is_exchange(path):
        return Recognised("kit: exchange checkpoint", "exchange", path, partial(_exchange, path))
    if (path / MANIFEST).is_file() and (path / STATE).is_dir():
        return Recognised("kit: native checkpoint", "native", path, partial(_native, path))
    return None


def _exchange(path: Path) -> ForeignState:
    exchange = ExchangeCheckpoint(path)
    found = {}
    for kind in exchange.kinds:
        source = exchange.source(kind)
        found[kind] = {
            name: StoredTensor(source.shape(name), source.read_block(name, 0, 0, 0).dtype, partial(source.read, name))
            for name in source.names()
        }
    weights = found.pop(exchange.kinds[0])
    notes = (f"adapters of rank {exchange.lora.rank}",) if exchange.lora else ()
    return ForeignState(weights, found, exchange.counters, notes=notes)


def _native(path: Path) -> ForeignState:
    manifest = read_manifest(path)
    layout: dict[str, int | str] = {"engine": manifest.model.partition(" ")[0], "world_size": manifest.world_size}
    return ForeignState({}, {}, manifest.counters, layout, moments_elsewhere=True)


def _universal(path: Path) -> Recognised | None:
    directory = universal.universal_directory(path)
    if directory is None:
        return None
    return Recognised(
        "DeepSpeed: universal checkpoint", "universal", directory, partial(universal.read_universal, directory)
    )


def _deepspeed(path: Path) -> Recognised | None:
    directory = deepspeed.deepspeed_directory(path)
    if directory is None:
        return None
    trainer = (path / "trainer_state.json").is_file()
    accelerate = directory.name == "pytorch_model"  # the tag that Accelerator.save_state chooses
    program = "Hugging Face Trainer with DeepSpeed" if trainer else f"{'accelerate with ' * accelerate}DeepSpeed"

    def opened() -> ForeignState:
        return torch_dcp.with_trainer_state(deepspeed.read_deepspeed(directory), path)

    return Recognised(program, "deepspeed", directory, opened)


def _distributed(path: Path) -> Recognised | None:
    if (directory := torch_dist_directory(path)) is not None and (
        (directory / "common.pt").exists() or (directory / "metadata.json").exists()
    ):
        return Recognised("Megatron: torch_dist", "megatron", directory, partial(_megatron, directory))
    model, optimizer = path / "pytorch_model_fsdp_0", path / "optimizer_0"
    if (model / ".metadata").is_file():
        directories = [model, *([optimizer] if optimizer.is_dir() else [])]
        if not all((directory / ".metadata").is_file() for directory in directories):
            raise CheckpointError(
                f"{optimizer} has no .metadata, which torch writes last: its save was cut off, or a file is missing; "
                "copy the checkpoint again, or remove this directory to convert the weights alone"
            )
        trainer = (path / "trainer_state.json").is_file()
        program = "Hugging Face Trainer with FSDP" if trainer else "accelerate: FSDP, sharded"

        def opened() -> ForeignState:
            return torch_dcp.with_trainer_state(torch_dcp.read_distributed(directories), path)

        return Recognised(program, "dcp", path, opened)
    if directory is not None:
        from kit.engines.megatron.checkpoint.torch_dist import Checkpoint

        titan = torchtitan.EMBEDDING in Checkpoint(directory).tensors
        program = "torchtitan: torch.distributed.checkpoint" if titan else "torch.distributed.checkpoint"
        return Recognised(program, "dcp", directory, partial(torch_dcp.read_distributed, [directory]))
    return None


def torch_dist_directory(path: Path) -> Path | None:
    """The directory with the torch_dist files: ``path``, ``path/state`` of a native checkpoint, or Megatron-LM's newest
    checkpoint in ``path``; None if there is none."""
    return next((each for each in (path, path / STATE, *_tracked(path)) if (each / ".metadata").is_file()), None)


def _tracked(path: Path) -> list[Path]:
    tracker = path / TRACKER
    if not tracker.is_file():
        return []
    newest = tracker.read_text(encoding="utf-8", errors="replace").strip()[:100]
    return [path / (f"iter_{int(newest):07d}" if newest.isdecimal() else Path(newest or ".").name)]


def _megatron(directory: Path) -> ForeignState:
    from kit.engines.megatron.checkpoint.torch_dist import Checkpoint

    checkpoint = Checkpoint(directory)
    tensors = {
        key: StoredTensor(tuple(found.size), found.properties.dtype, partial(torch_dcp.whole, checkpoint, key))
        for key, found in checkpoint.tensors.items()
    }
    state = ForeignState({key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer.")})
    common = checkpoint.common()
    said = {name: common.get(name) for name in ("iteration",)} | {"steps": checkpoint.optimizer_steps()}
    iteration, steps = (value if type(value) is int and 0 <= value < 1 << 62 else 0 for value in said.values())
    step = max(iteration, steps)
    counters = dataclasses.replace(state.counters, step=step, optimizer_steps=steps)
    moments = any(key.startswith("optimizer.state.exp_avg.") for key in tensors)
    return dataclasses.replace(state, counters=counters, moments_elsewhere=moments)


def _megatron_old(path: Path) -> Recognised | None:
    for directory in (path, *_tracked(path)):
        if any((each / "model_optim_rng.pt").is_file() for each in directory.glob("mp_rank_*")):
            program = "Megatron-LM: old torch format"
            return Recognised(program, "megatron-old", directory, partial(_torch_format, directory))
    return None


def _torch_format(directory: Path) -> ForeignState:
    return torch_format_state(open_torch_format(directory))


def _peft(path: Path) -> Recognised | None:
    if not (path / "adapter_config.json").is_file():
        return None
    stems = ("adapter_model.safetensors", "adapter_model.bin")
    return Recognised("peft: adapters", "peft", path, lambda: torch_dcp.read_weights(weight_files(path, *stems)))


def _hugging_face(path: Path) -> Recognised | None:
    if not (path / "config.json").is_file():
        return None
    trainer = (path / "trainer_state.json").is_file()

    def opened() -> ForeignState:
        return torch_dcp.with_trainer_state(torch_dcp.read_weights(weight_files(path)), path)

    notes = ("optimizer.pt, of one process, is not read: weights only",) if (path / "optimizer.pt").is_file() else ()
    return Recognised("Hugging Face Trainer" if trainer else "Hugging Face model", "hf", path, opened, notes)


def inspected(path: Path) -> Inspected:
    """What ``path`` is. Raises CheckpointError if it is no checkpoint that kit knows, or damaged."""
    found = recognise(path)
    state = found.open() if found.open is not None else ForeignState({}, notes=())
    counters = state.counters
    known = found.open is not None
    return Inspected(
        path=str(path),
        program=found.program,
        format=found.format,
        step=counters.step or None,
        optimizer_steps=counters.optimizer_steps or None,
        samples_seen=counters.samples_seen or None,
        layout=dict(state.layout),
        dtypes=sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.weights.values()}),
        parameters=number_of_parameters(state.weights) if state.weights else None,
        tensors=len(state.weights) or None,
        adam=bool(state.moments) or state.moments_elsewhere,
        hyperparameters=[dict(group) for group in state.adam],
        model=_model(path),
        notes=[*(readers(found.directory) if found.format == "hf" else []), *found.notes, *state.notes],
        can=_commands(found, path) if known else [],
    )


def _model(path: Path) -> str | None:
    """The model's type and architecture by config.json, or by the JSON of the exchange checkpoint or of peft."""
    if is_exchange(path):
        return ExchangeCheckpoint(path).model.name
    for name, keys in (("config.json", ("model_type", "architectures")), ("adapter_config.json", _PEFT_KEYS)):
        if (path / name).is_file():
            try:
                config: dict[str, Any] = parse_json(read_text(path / name))
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path / name} is damaged ({error}); copy the checkpoint again") from error
            return ", ".join(f"{key} {json.dumps(config[key])}" for key in keys if key in config)
    return None


_PEFT_KEYS = ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules")


def _commands(found: Recognised, path: Path) -> list[str]:
    """What kit does with a checkpoint of this format."""
    model = "" if (path / "config.json").is_file() or found.format in ("exchange", "native") else " --model MODEL"
    convert = f"kit convert model {path} --to {{}} --out DIRECTORY{model}"
    if found.format == "native":
        # Of the other engines' files only the run itself knows the layout; it writes an exchange checkpoint at its end.
        by_megatron = torch_dist_directory(path) is not None
        return ["kit train RUN --resume auto", *([convert.format("exchange")] if by_megatron else [])]
    if found.format == "exchange":
        return [f"kit train RUN --resume {path}", *map(convert.format, ("hf", "megatron", "dcp", "universal"))]
    if found.format == "file":
        return []
    return [convert.format("exchange") + ", then kit train RUN --resume DIRECTORY"]
