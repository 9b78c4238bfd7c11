"""Every change of layout, world size or engine is: export to an exchange checkpoint, import from it."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from kit.engines.base import Engine, ParallelExport, PartsExport, StateKind
from kit.engines.huggingface.adapters import checkpoint_shapes
from kit.engines.huggingface.models import check_names, check_shape
from kit.engines.io.sharded_safetensors import DEFAULT_SHARD_BYTES, SafetensorsWriter, plan_files
from kit.errors import CheckpointError
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec
from kit.training.checkpoint.collective import together
from kit.training.checkpoint.counters import Counters, RunLength
from kit.training.checkpoint.exchange import EXCHANGE_JSON, KINDS, ExchangeCheckpoint, exchange_json
from kit.training.checkpoint.files import FileRecord, is_free, partial_name, publish, write_json
from kit.training.checkpoint.parallel_export import write_parts
from kit.training.checkpoint.to_huggingface import exchange_to_hf

__all__ = ["Counters", "ExchangeCheckpoint", "exchange_to_hf", "export_exchange", "export_tensors", "import_exchange"]

_Stream = Iterator[tuple[str, torch.Tensor]]


def export_exchange(
    engine: Engine,
    directory: Path,
    counters: Counters,
    *,
    model: ModelSpec,
    lora: LoraSpec | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Collective. Write weights, moments and counters to the new ``directory``; all ranks see the same outcome.

    Every rank writes the parts of tensors that it holds, or else the tensors that it owns, as they come: one at a time
    is held. With ``lora`` they are the adapters'. The directory appears complete or not at all. Raises CheckpointError,
    on every rank, where it exists already or cannot be written.
    """
    doing = f"writing the exchange checkpoint {directory}"
    partial = partial_name(directory)
    shapes = checkpoint_shapes(model, lora)
    together(engine.is_main, lambda: _start(directory, partial), doing)
    try:
        if isinstance(engine, PartsExport):
            plan = {kind: _files(kind, dict.fromkeys(shapes, 0), shapes, shard_bytes) for kind in KINDS}
            joint = {kind: of_ranks[0] for kind, of_ranks in plan.items()}
            records = write_parts(engine, engine.is_main, partial, joint, shapes, doing)
        else:
            owners = engine.owners if isinstance(engine, ParallelExport) else dict.fromkeys(shapes, 0)
            plan = {kind: _files(kind, owners, shapes, shard_bytes) for kind in KINDS}
            shares = together(True, lambda: _write_own(engine, partial, plan, shapes), doing)
            records = {name: record for share in shares for name, record in share.items()}
        weight_map = {
            kind: {name: file for of_rank in files.values() for file, names in of_rank.items() for name in names}
            for kind, files in plan.items()
        }
        contents = exchange_json(counters, model, weight_map, dict(sorted(records.items())), lora)
        together(engine.is_main, lambda: _publish(partial, directory, contents), doing)
    except CheckpointError:
        if engine.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def import_exchange(engine: Engine, directory: Path, length: RunLength | None = None) -> Counters:
    """Collective. Load weights, moments and Adam's step count from an exchange checkpoint; returns its counters.

    Everything is checked before anything is loaded: sizes and hashes (shared out), names and shapes, and the counters
    against ``length``, the run that goes on from them. Raises
    CheckpointError, on every rank, that names what is missing, truncated, corrupted or foreign.
    """
    doing = f"reading the exchange checkpoint {directory}"
    exchange = ExchangeCheckpoint(directory)
    together(True, lambda: _check(exchange), doing)
    if length is not None:
        together(engine.is_main, lambda: length.check(exchange.counters, directory, same_plan=False), doing)
    if exchange.note is not None and engine.is_main:
        print(exchange.note, flush=True)
    for kind in exchange.kinds:
        engine.import_state(kind, exchange.source(kind))
    engine.set_optimizer_steps(exchange.counters.optimizer_steps)
    return exchange.counters


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


def _files(
    kind: StateKind, owners: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], shard_bytes: int
) -> dict[int, dict[str, list[str]]]:
    """Rank → file → names, files numbered over all ranks."""
    plan: dict[int, dict[str, list[str]]] = {}
    number = 0
    for rank in sorted(set(owners.values())):
        plan[rank] = {}
        mine = (name for name, owner in owners.items() if owner == rank)
        for names in plan_files(mine, shapes, torch.float32.itemsize, shard_bytes):
            number += 1
            plan[rank][f"{kind.value}-{number:05d}.safetensors"] = names
    return plan


def _write_own(
    engine: Engine,
    partial: Path,
    plan: Mapping[StateKind, Mapping[int, Mapping[str, list[str]]]],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, FileRecord]:
    """This rank's files. After a failure the rest is still streamed: the other ranks wait in its collectives."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    stream = (item for kind in KINDS for item in _owned(engine, kind))
    records = {}
    try:
        for kind in KINDS:
            for file, names in plan[kind].get(rank, {}).items():
                records[file] = _write_file(partial / file, {name: shapes[name] for name in names}, stream)
        assert next(stream, None) is None, "a rank writes what it is given"
    finally:
        deque(stream, maxlen=0)
    return records


def _write_file(path: Path, shapes: Mapping[str, tuple[int, ...]], stream: _Stream) -> FileRecord:
    writer = SafetensorsWriter(path, {name: (torch.float32, shape) for name, shape in shapes.items()})
    try:
        for name, tensor in islice(stream, len(shapes)):
            writer.write(name, tensor)
        return FileRecord(*writer.finish())
    except BaseException:
        writer.abandon()
        raise


def _owned(engine: Engine, kind: StateKind) -> _Stream:
    if isinstance(engine, ParallelExport):
        yield from engine.export_owned(kind)
    else:
        yield from ((name, tensor) for name, tensor in engine.export_state(kind) if tensor is not None)


def _start(directory: Path, partial: Path) -> None:
    if not is_free(directory):
        raise CheckpointError(f"{directory} exists and is not empty; choose another directory or remove it yourself")
    shutil.rmtree(partial, ignore_errors=True)  # of an attempt that was killed
    partial.mkdir(parents=True)


def _publish(partial: Path, directory: Path, contents: dict[str, Any]) -> None:
    write_json(partial / EXCHANGE_JSON, contents)
    publish(partial, directory)


def _check(exchange: ExchangeCheckpoint) -> None:
    exchange.verify(hashes=False)
    exchange.verify_share()
    shapes = checkpoint_shapes(exchange.model, exchange.lora)
    # Weights alone are where a run begins: before the first step there are no moments to take over.
    for kind in KINDS if exchange.counters.optimizer_steps else {StateKind.MASTER, *exchange.kinds}:
        source = exchange.source(kind)
        check_names(shapes, source)
        for name, shape in shapes.items():
            check_shape(name, shape, source.shape(name))
