"""Writes an engine's state into a checkpoint's directory, and reads it back on any engine, layout and world size.

Every rank writes its own blocks of the tensors. The files have whole tensors, so torch and transformers read them as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save, save_file

from kit.engines.collective import on_all_ranks, rank, split_over_ranks
from kit.engines.full_tensors import full_tensors
from kit.engines.huggingface.adapters import checkpoint_shapes
from kit.engines.huggingface.models import check_tensors, hf_config
from kit.engines.io.parallel_safetensors import BlockWriter, ParallelFile, size_hash_and_sum
from kit.engines.io.sharded_safetensors import DEFAULT_SHARD_BYTES, split_into_files, write_tensors
from kit.engines.protocol import Engine, StateKind, TensorShard, TensorSource
from kit.errors import CheckpointError
from kit.files import complete_file, fsync
from kit.specs.job import LoraSpec, OptimizerName
from kit.specs.model import ModelSpec
from kit.specs.optimizers import OPTIMIZERS
from kit.training.checkpoint import random_state
from kit.training.checkpoint.files import FileRecord, record_of, write_json
from kit.training.checkpoint.manifest import FOLDERS, PRIVATE, RANDOM, Checkpoint, Manifest, kinds_of, manifest_json
from kit.training.checkpoint.storage import MANIFEST
from kit.training.counters import Counters

Shapes = Mapping[str, tuple[int, ...]]
"""Hugging Face name → shape of the whole tensor."""


@dataclass(frozen=True)
class State:
    """What this rank writes of a run's state."""

    kinds: tuple[StateKind, ...]
    blocks: Callable[[], Iterator[TensorShard]]
    scalars: Mapping[str, float]
    private: Mapping[str, torch.Tensor]
    random: random_state.RandomState | None


def state_of(engine: Engine, copy: bool = False, random: bool = True) -> State:
    """Collective. The state that ``engine`` has now. ``copy``: in host memory, so that training can go on while another
    thread writes it. ``random``: with the random generators of this process."""
    kinds = kinds_of(engine.optimizer_name)
    private = engine.private_tensors()
    blocks: Callable[[], Iterator[TensorShard]] = partial(engine.export_blocks, kinds)
    if copy:
        private = {name: tensor.to("cpu", copy=True) for name, tensor in private.items()}
        held = [replace(block, values=_on_host(block.values)) for block in blocks()]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # wait for the copies
        blocks = partial(iter, held)
    captured = random_state.capture() if random else None
    return State(kinds, blocks, engine.scalars(), private, captured)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, page-locked beside a GPU, which may still copy when this returns."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def write_state(
    state: State,
    directory: Path,
    is_main: bool,
    model: ModelSpec,
    lora: LoraSpec | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> tuple[dict[str, str], dict[str, FileRecord]]:
    """Collective over ``group``. Write everything but the manifest into an existing directory; returns (weight map,
    records of all files). Raises CheckpointError on every rank."""
    doing = f"writing the checkpoint {directory}"
    shapes = checkpoint_shapes(model, lora)
    weight_map = _weight_map(shapes, shard_bytes)
    on_all_ranks(is_main, lambda: _start(directory, state.kinds, model, lora, weight_map), doing, group=group)
    records = write_blocks(state, directory, weight_map, shapes, is_main, doing, group)
    mine = on_all_ranks(True, lambda: _write_own(state, directory), doing, group=group)
    records |= {name: record for each in mine for name, record in each.items()}
    return weight_map, records | on_all_ranks(is_main, lambda: _beside_weights(directory), doing, group=group)[0]


def _weight_map(shapes: Shapes, shard_bytes: int) -> dict[str, str]:
    """Name → file."""
    tensors = {name: (torch.float32, shape) for name, shape in shapes.items()}
    files = split_into_files(tensors, shard_bytes).filename_to_tensors.values()
    return {
        name: f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for number, names in enumerate(files, 1)
        for name in names
    }


def _start(
    directory: Path,
    kinds: Sequence[StateKind],
    model: ModelSpec,
    lora: LoraSpec | None,
    weight_map: Mapping[str, str],
) -> None:
    """Create the folders, and beside the weights what transformers needs to load them."""
    for folder in (*(FOLDERS[kind] for kind in kinds), PRIVATE, RANDOM):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    weights = directory / FOLDERS[StateKind.MASTER]
    write_json(weights / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    if lora is None:
        hf_config(model).save_pretrained(weights)


def _write_own(state: State, directory: Path) -> dict[str, FileRecord]:
    """Write this rank's private tensors and random generators, and flush them: the rank that publishes the directory
    cannot flush what another host has in memory."""
    ends = (PRIVATE, "safetensors"), (RANDOM, "json")
    private, random = (directory / folder / f"rank-{rank():05d}.{ending}" for folder, ending in ends)
    if state.private:
        save_file({key: tensor.cpu().contiguous() for key, tensor in state.private.items()}, private)
    if state.random is not None:
        random_state.write(state.random, random.parent, rank())
    own = [path for path in (private, random) if path.exists()]
    for path in own:
        fsync(path)
    return {str(path.relative_to(directory)): record_of(path) for path in own}


def _beside_weights(directory: Path) -> dict[str, FileRecord]:
    found = sorted((directory / FOLDERS[StateKind.MASTER]).glob("*.json"))
    return {str(path.relative_to(directory)): record_of(path) for path in found}


def write_blocks(
    state: State,
    directory: Path,
    weight_map: Mapping[str, str],
    shapes: Shapes,
    is_main: bool,
    doing: str,
    group: dist.ProcessGroup | None = None,
) -> dict[str, FileRecord]:
    """Collective over ``group``. Write all tensors. Raises CheckpointError on every rank.

    After writing, the ranks read and hash the files, each rank its share. A sum of the written words, compared with the
    sum of the read words, detects lost writes: ranks of several hosts write to the same file, and some network file
    systems fail at this.
    """
    files = {
        (kind, file): ParallelFile(directory / FOLDERS[kind] / file, {name: shapes[name] for name in own})
        for kind in state.kinds
        for file, own in _names(weight_map).items()
    }
    created = on_all_ranks(is_main, lambda: {key: file.create() for key, file in files.items()}, doing, group=group)
    written = on_all_ranks(True, lambda: _write(state, files, weight_map), doing, (Exception,), group)
    expected = {key: (created[0][key] + _once(file, written)) % 2**32 for key, file in files.items()}
    mine = split_over_ranks([*expected])
    shares = on_all_ranks(
        True,
        lambda: {
            f"{FOLDERS[kind]}/{name}": _record(files[kind, name].path, expected[kind, name]) for kind, name in mine
        },
        doing,
        group=group,
    )
    return {name: record for each in shares for name, record in each.items()}


def _once(file: ParallelFile, written: Sequence[Mapping[Path, tuple[int, int]]]) -> int:
    """Sum of the words that all ranks wrote to a file. Raises CheckpointError, on every rank, unless they are as many
    as its elements: with the sum, which counts twice what two ranks wrote, each element was written once."""
    counts, sums = zip(*(each.get(file.path, (0, 0)) for each in written), strict=True)
    if sum(counts) != file.elements:
        raise CheckpointError(
            f"{file.path}: the ranks wrote {sum(counts):,} of its {file.elements:,} values; this is a fault of the "
            "engine's export: report it, with the plan"
        )
    return sum(sums)


def _write(
    state: State, files: Mapping[tuple[StateKind, str], ParallelFile], weight_map: Mapping[str, str]
) -> dict[Path, tuple[int, int]]:
    with BlockWriter() as writer:
        for block in state.blocks():
            file = files[block.kind, weight_map[block.name]]
            writer.write(file, block.name, block.row, block.column, block.values)
    return writer.written


def _record(path: Path, expected_sum: int) -> FileRecord:
    size, digest, total = size_hash_and_sum(path)
    if total != expected_sum:
        raise CheckpointError(
            f"{path} does not hold what was written to it: this file system loses writes where several hosts write to "
            f"one file; write checkpoints to a local disk or a parallel file system"
        )
    return FileRecord(size, digest)


def write_sources(
    directory: Path,
    model: ModelSpec,
    sources: Mapping[StateKind, TensorSource],
    counters: Counters,
    lora: LoraSpec | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a checkpoint from full tensors in one process, into an existing empty directory, one tensor at a time.
    ``sources``: exactly the model's tensors, or the adapters' (``check_tensors``). Raises CheckpointError."""
    shapes = checkpoint_shapes(model, lora)
    in_its_order = {name: shapes[name] for name in sources[StateKind.MASTER].names() if name in shapes}
    weight_map = _weight_map(in_its_order, shard_bytes)
    _start(directory, tuple(sources), model, lora, weight_map)
    files = _beside_weights(directory)
    for kind, source in sources.items():
        for file, names in _names(weight_map).items():
            path = directory / FOLDERS[kind] / file
            tensors = {name: (torch.float32, shapes[name]) for name in names}
            files[f"{FOLDERS[kind]}/{file}"] = FileRecord(*write_tensors(path, tensors, source))
    manifest = Manifest(
        counters=counters, model=model, files=files, weight_map=weight_map, kinds=tuple(sources), lora=lora
    )
    write_manifest(directory, manifest)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write what makes a directory a checkpoint, and remove its empty folders."""
    for folder in [path for path in directory.iterdir() if path.is_dir() and not any(path.iterdir())]:
        folder.rmdir()
    write_json(directory / MANIFEST, manifest_json(manifest))


def _names(weight_map: Mapping[str, str]) -> dict[str, list[str]]:
    """File → its tensors."""
    names: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        names.setdefault(file, []).append(name)
    return names


def check_state(checkpoint: Checkpoint, optimizer: OptimizerName, model: ModelSpec, lora: LoraSpec | None) -> None:
    """Raises CheckpointError if the checkpoint is not of this model, adapters and optimizer, or lacks a tensor."""
    said = checkpoint.manifest
    if said.counters.optimizer_steps and OPTIMIZERS[said.optimizer].state_of != OPTIMIZERS[optimizer].state_of:
        raise CheckpointError(
            f"{checkpoint.path} has the state of optimizer.name={said.optimizer}, and this run has "
            f"optimizer.name={optimizer}; resume with {said.optimizer}, or start from its weights "
            "(kit convert model --to hf, then run.model_path)"
        )
    shapes = checkpoint_shapes(model, lora)
    # A checkpoint before the first step may have weights only.
    for kind in kinds_of(said.optimizer) if said.counters.optimizer_steps else said.kinds:
        source = checkpoint.source(kind)
        check_tensors(shapes, source)


def load_state(engine: Engine, checkpoint: Checkpoint, same_layout: bool) -> None:
    """Collective. Set the engine's state from a checkpoint that ``check_state`` has passed. ``same_layout``: also the
    private tensors and this rank's random generators, for a run that goes on bit for bit."""
    said, reading = checkpoint.manifest, f"reading {checkpoint.path}"
    for kind in said.kinds:
        engine.import_state(kind, checkpoint.source(kind))
    engine.set_optimizer_steps(said.counters.optimizer_steps)
    engine.set_scalars(said.scalars)
    if same_layout and checkpoint.has(PRIVATE):
        _read_private(engine, checkpoint.path / PRIVATE / f"rank-{rank():05d}.safetensors")
    if same_layout and checkpoint.has(RANDOM):
        on_all_ranks(True, lambda: random_state.read(checkpoint.path / RANDOM, rank()), reading)


def _read_private(engine: Engine, path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        for name, tensor in engine.private_tensors().items():
            tensor.copy_(file.get_tensor(name))


def export_tensors(engine: Engine, kind: StateKind, path: Path) -> None:
    """Collective. Write one kind of state to a single safetensors file; replaces an existing file.

    For comparisons of small models, because the main rank gathers all tensors. Raises CheckpointError on every rank.
    """
    tensors = full_tensors(engine, kind)

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with complete_file(path) as file:
            file.write(save(tensors, metadata={"format": "pt"}))

    on_all_ranks(engine.is_main, write, f"writing {path}")
