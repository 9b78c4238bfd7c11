"""Every change of layout, world size or engine is: export to an exchange checkpoint, import from it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kit.engines.base import Engine, StateKind
from kit.engines.full_tensors import full_tensors
from kit.engines.huggingface.adapters import checkpoint_shapes
from kit.engines.huggingface.models import check_names, check_shape
from kit.engines.io.sharded_safetensors import DEFAULT_SHARD_BYTES, plan_files
from kit.errors import CheckpointError
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec
from kit.training.checkpoint.collective import run_collectively
from kit.training.checkpoint.counters import Counters, RunLength
from kit.training.checkpoint.exchange import EXCHANGE_JSON, KINDS, ExchangeCheckpoint, exchange_json
from kit.training.checkpoint.files import is_free, partial_name, publish, write_json
from kit.training.checkpoint.parallel_export import write_blocks
from kit.training.checkpoint.to_huggingface import exchange_to_hf

__all__ = ["Counters", "ExchangeCheckpoint", "exchange_to_hf", "export_exchange", "export_tensors", "import_exchange"]


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

    Every rank writes its blocks of the tensors as they come: one at a time is held. With ``lora`` they are the
    adapters'. The directory appears complete or not at all. Raises CheckpointError, on every rank, where it exists
    already or cannot be written.
    """
    doing = f"writing the exchange checkpoint {directory}"
    partial = partial_name(directory)
    shapes = checkpoint_shapes(model, lora)
    run_collectively(engine.is_main, lambda: _start(directory, partial), doing)
    try:
        plan = {kind: _files(kind, engine.owners, shapes, shard_bytes) for kind in KINDS}
        records = write_blocks(engine, partial, plan, shapes, doing)
        weight_map = {
            kind: {name: file for file, names in files.items() for name in names} for kind, files in plan.items()
        }
        contents = exchange_json(counters, model, weight_map, dict(sorted(records.items())), lora)
        run_collectively(engine.is_main, lambda: _publish(partial, directory, contents), doing)
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
    run_collectively(True, lambda: _check(exchange), doing)
    if length is not None:
        run_collectively(engine.is_main, lambda: length.check(exchange.counters, directory, same_plan=False), doing)
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
    tensors = full_tensors(engine, kind)

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        try:
            save_file(dict(tensors), partial, metadata={"format": "pt"})
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    run_collectively(engine.is_main, write, f"writing {path}")


def _files(
    kind: StateKind, owners: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], shard_bytes: int
) -> dict[str, list[str]]:
    """File → names. Tensors of different owners are in different files, each written by one rank."""
    by_owner: dict[int, list[str]] = {}
    for name in shapes:
        by_owner.setdefault(owners.get(name, 0), []).append(name)
    files = [
        names
        for _, own in sorted(by_owner.items())
        for names in plan_files(own, shapes, torch.float32.itemsize, shard_bytes)
    ]
    return {f"{kind.value}-{number:05d}.safetensors": names for number, names in enumerate(files, 1)}


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
