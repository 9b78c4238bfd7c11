"""Every change of layout, world size or engine is: export to a hub checkpoint, import from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import torch
from safetensors.torch import save_file

from kit.engines.base import Engine, StateKind
from kit.engines.hf import check_names, check_shape, parameter_shapes
from kit.engines.shards import DEFAULT_SHARD_BYTES, ShardWriter
from kit.errors import CheckpointError
from kit.specs.model import ModelSpec
from kit.training.checkpoint.agreement import together
from kit.training.checkpoint.files import is_free, new_directory, record_of, write_json
from kit.training.checkpoint.hub_checkpoint import HUB_JSON, KINDS, Counters, HubCheckpoint, hub_json
from kit.training.checkpoint.to_huggingface import hub_to_hf

__all__ = ["Counters", "HubCheckpoint", "export_hub", "export_tensors", "hub_to_hf", "import_hub"]

_Stream = Iterator[tuple[StateKind, str, torch.Tensor | None]]


def export_hub(
    engine: Engine, directory: Path, counters: Counters, *, model: ModelSpec, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Collective. Write weights, moments and counters to the new ``directory``; all ranks see the same outcome.

    The main rank writes and holds at most ``shard_bytes`` of tensors (or one tensor). The directory appears
    complete or not at all. Raises CheckpointError, on every rank, where it exists already or cannot be written.
    """
    doing = f"writing the hub checkpoint {directory}"
    together(engine.is_main, lambda: _refuse_existing(directory), doing)
    stream = ((kind, name, tensor) for kind in KINDS for name, tensor in engine.export_state(kind))

    def write() -> None:
        try:
            with new_directory(directory) as partial:
                _write(stream, partial, counters, model, shard_bytes)
        finally:
            deque(stream, maxlen=0)  # after a failure too: the other ranks wait in the collectives of export_state

    if not engine.is_main:
        deque(stream, maxlen=0)
    together(engine.is_main, write, doing)


def import_hub(engine: Engine, directory: Path) -> Counters:
    """Collective. Load weights, moments and Adam's step count from a hub checkpoint; returns its counters.

    Everything is checked before anything is loaded: sizes and hashes (on the main rank), names and shapes. Raises
    CheckpointError, on every rank, that names what is missing, truncated, corrupted or foreign.
    """
    doing = f"reading the hub checkpoint {directory}"
    hub = HubCheckpoint(directory)
    together(True, lambda: _check(hub, hashes=engine.is_main), doing)
    for kind in KINDS:
        engine.import_state(kind, hub.source(kind))
    engine.set_optimizer_steps(hub.counters.optimizer_steps)
    return hub.counters


def export_tensors(engine: Engine, kind: StateKind, path: Path) -> None:
    """Collective. Write one kind of state to a single safetensors file, replacing an older one.

    For comparisons of small models: the main rank holds all of it. Raises CheckpointError on every rank.
    """
    tensors = {name: tensor for name, tensor in engine.export_state(kind) if tensor is not None}

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        try:
            save_file(tensors, partial, metadata={"format": "pt"})
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    together(engine.is_main, write, f"writing {path}")


def _write(stream: _Stream, partial: Path, counters: Counters, model: ModelSpec, shard_bytes: int) -> None:
    weight_map: dict[StateKind, dict[str, str]] = {}
    for kind, tensors in groupby(stream, key=itemgetter(0)):
        writer = ShardWriter(partial, kind.value, shard_bytes)
        for _, name, tensor in tensors:
            assert tensor is not None, "export_state gives the main rank every tensor"
            writer.add(name, tensor)
        weight_map[kind] = writer.finish()
    files = sorted({file for of_kind in weight_map.values() for file in of_kind.values()})
    records = {file: record_of(partial / file) for file in files}
    write_json(partial / HUB_JSON, hub_json(counters, model, weight_map, records))


def _refuse_existing(directory: Path) -> None:
    if not is_free(directory):
        raise CheckpointError(f"{directory} exists and is not empty; choose another directory or remove it yourself")


def _check(hub: HubCheckpoint, hashes: bool) -> None:
    hub.verify(hashes)
    shapes = parameter_shapes(hub.model)
    for kind in KINDS:
        source = hub.source(kind)
        check_names(shapes, source)
        for name, shape in shapes.items():
            check_shape(name, shape, source.shape(name))
