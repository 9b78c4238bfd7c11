"""Exports an engine's state to an exchange checkpoint and imports it, on any layout, world size and engine."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kit.engines.collective import run_collectively, split_over_ranks
from kit.engines.full_tensors import full_tensors
from kit.engines.huggingface.adapters import checkpoint_shapes
from kit.engines.huggingface.models import check_names, check_shape
from kit.engines.io.parallel_safetensors import BlockWriter, ParallelFile, size_hash_and_sum
from kit.engines.io.sharded_safetensors import DEFAULT_SHARD_BYTES, plan_files
from kit.engines.protocol import Engine, StateKind
from kit.errors import CheckpointError
from kit.files import partial_name, publish
from kit.specs.job import LoraSpec, OptimizerName
from kit.specs.model import ModelSpec
from kit.specs.optimizers import OPTIMIZERS
from kit.training.checkpoint.counters import Counters, RunLength
from kit.training.checkpoint.exchange import EXCHANGE_JSON, ExchangeCheckpoint, exchange_json, kinds_of
from kit.training.checkpoint.files import FileRecord, start_partial, write_json


def export_exchange(
    engine: Engine,
    directory: Path,
    counters: Counters,
    *,
    model: ModelSpec,
    lora: LoraSpec | None = None,
    chat_template: str | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Collective. Write weights, moments and counters to the new ``directory``.

    Every rank writes its own blocks of the tensors, one at a time. With ``lora`` the tensors are the adapters.
    ``chat_template``: by which the run's chats became tokens. The directory is complete or absent. Raises
    CheckpointError on every rank if ``directory`` exists already or cannot be written.
    """
    doing = f"writing the exchange checkpoint {directory}"
    partial = partial_name(directory)
    shapes = checkpoint_shapes(model, lora)
    run_collectively(engine.is_main, lambda: start_partial(directory), doing)
    try:
        plan = {kind: _files(kind, engine.owners, shapes, shard_bytes) for kind in kinds_of(engine.optimizer_name)}
        records = write_blocks(engine, partial, plan, shapes, doing)
        weight_map = {
            kind: {name: file for file, names in files.items() for name in names} for kind, files in plan.items()
        }
        name, records = engine.optimizer_name, dict(sorted(records.items()))
        contents = exchange_json(counters, model, weight_map, records, lora, name, chat_template)
        run_collectively(engine.is_main, lambda: _publish(partial, directory, contents), doing)
    except CheckpointError:
        if engine.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def import_exchange(engine: Engine, directory: Path, length: RunLength | None = None) -> Counters:
    """Collective. Load weights, moments and Adam's step count from an exchange checkpoint; returns its counters.

    Before it loads a tensor, it checks sizes and hashes (each rank hashes some of the files), names and shapes, and the
    counters against ``length`` of the run that continues. Raises CheckpointError on every rank, which names the
    missing, truncated, corrupted or foreign file or tensor.
    """
    doing = f"reading the exchange checkpoint {directory}"
    exchange = ExchangeCheckpoint(directory)
    run_collectively(True, lambda: _check(exchange, engine.optimizer_name), doing)
    if length is not None:
        run_collectively(engine.is_main, lambda: length.check(exchange.counters, directory, same_plan=False), doing)
    for kind in exchange.kinds:
        engine.import_state(kind, exchange.source(kind))
    engine.set_optimizer_steps(exchange.counters.optimizer_steps)
    return exchange.counters


def export_tensors(engine: Engine, kind: StateKind, path: Path) -> None:
    """Collective. Write one kind of state to a single safetensors file; replaces an existing file.

    For comparisons of small models, because the main rank gathers all tensors. Raises CheckpointError on every rank.
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
    """File → names of its tensors. Tensors of different owners are in different files, so that one rank writes a
    file."""
    by_owner: dict[int, list[str]] = {}
    for name in shapes:
        by_owner.setdefault(owners.get(name, 0), []).append(name)
    files = [
        names
        for _, own in sorted(by_owner.items())
        for names in plan_files(own, shapes, torch.float32.itemsize, shard_bytes)
    ]
    return {f"{kind.value}-{number:05d}.safetensors": names for number, names in enumerate(files, 1)}


def _publish(partial: Path, directory: Path, contents: dict[str, Any]) -> None:
    write_json(partial / EXCHANGE_JSON, contents)
    publish(partial, directory)


def _check(exchange: ExchangeCheckpoint, optimizer: OptimizerName) -> None:
    wrote, stepped = exchange.optimizer, exchange.counters.optimizer_steps > 0
    if stepped and OPTIMIZERS[wrote].state_of != OPTIMIZERS[optimizer].state_of:
        raise CheckpointError(
            f"{exchange.path} has the state of optimizer.name={wrote}, and this run has optimizer.name={optimizer}; "
            f"resume with {wrote}, or start from its weights (kit convert model --to hf, then run.model_path)"
        )
    exchange.verify(share=True)
    shapes = checkpoint_shapes(exchange.model, exchange.lora)
    # A checkpoint before the first step may have weights only.
    needed = kinds_of(exchange.optimizer) if exchange.counters.optimizer_steps else {StateKind.MASTER, *exchange.kinds}
    for kind in needed:
        source = exchange.source(kind)
        check_names(shapes, source)
        for name, shape in shapes.items():
            check_shape(name, shape, source.shape(name))


_Files = Mapping[StateKind, Mapping[str, Sequence[str]]]
"""Kind → file → names of its tensors."""


def write_blocks(
    engine: Engine, directory: Path, plan: _Files, shapes: Mapping[str, tuple[int, ...]], doing: str
) -> dict[str, FileRecord]:
    """Collective. Write all files of ``plan`` into ``directory``. Raises CheckpointError on every rank.

    After writing, the ranks read and hash the files, each rank its share. A sum of the written words, compared with the
    sum of the read words, detects lost writes: ranks of several hosts write to the same file, and some network file
    systems fail at this.
    """
    files = {
        kind: [
            ParallelFile(directory / file, {name: shapes[name] for name in names}) for file, names in of_kind.items()
        ]
        for kind, of_kind in plan.items()
    }
    everything = [file for of_kind in files.values() for file in of_kind]
    (heads,) = run_collectively(engine.is_main, lambda: {file.path: file.create() for file in everything}, doing)
    sums = run_collectively(True, lambda: _write(engine, files), doing)
    expected = {path: (head + sum(each.get(path, 0) for each in sums)) % 2**32 for path, head in heads.items()}
    mine = split_over_ranks([*expected])
    shares = run_collectively(True, lambda: {path.name: _record(path, expected[path]) for path in mine}, doing)
    return {name: record for each in shares for name, record in each.items()}


def _write(engine: Engine, files: Mapping[StateKind, Sequence[ParallelFile]]) -> dict[Path, int]:
    where = {(kind, name): file for kind, of_kind in files.items() for file in of_kind for name in file.shapes}
    writer, blocks = BlockWriter(), engine.export_blocks(list(files))
    try:
        for block in blocks:
            writer.write(where[block.kind, block.name], block.name, block.row, block.column, block.values)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
    finally:
        deque(blocks, maxlen=0)  # also after a failure, because other ranks wait in the export's collectives
    return writer.sums


def _record(path: Path, expected_sum: int) -> FileRecord:
    size, digest, total = size_hash_and_sum(path)
    if total != expected_sum:
        raise CheckpointError(
            f"{path} does not hold what was written to it: this file system loses writes where several hosts write to "
            f"one file; write checkpoints to a local disk or a parallel file system"
        )
    return FileRecord(size, digest)
