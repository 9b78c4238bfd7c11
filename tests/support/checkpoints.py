"""Checkpoints of an engine without a run, and state that is in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.engines.collective import on_all_ranks
from kit.engines.huggingface.experts import split_experts
from kit.engines.io.sharded_safetensors import DEFAULT_SHARD_BYTES
from kit.engines.protocol import Engine, TensorSource
from kit.planner.plan import Plan
from kit.specs.model import ModelSpec
from kit.training.checkpoint.manifest import Checkpoint, Manifest
from kit.training.checkpoint.store import check_state, load_state, state_of, write_manifest, write_state
from kit.training.counters import Counters


class InMemory(TensorSource):
    """A source of these tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def same_tensors(found: TensorSource, expected: TensorSource) -> bool:
    """Whether both have the same names, and under each the same tensor, bit for bit."""
    names = sorted(expected.names())
    pairs = ((found.read(name), expected.read(name)) for name in names)
    # torch.equal calls equal values of two dtypes equal.
    return sorted(found.names()) == names and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def same_state(found: Checkpoint, expected: Checkpoint) -> bool:
    """Whether weights and moments of two checkpoints are equal bit for bit."""
    kinds = expected.manifest.kinds
    return found.manifest.kinds == kinds and all(
        same_tensors(found.source(kind), expected.source(kind)) for kind in kinds
    )


def captured(
    engine: Engine, plan: Plan, counters: Counters, copy: bool = True, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Callable[[Path], None]:
    """Collective. Copy the engine's state now; the function that is returned writes it into a new directory."""
    state, is_main = state_of(engine, copy=copy, random=False), engine.is_main

    def write(directory: Path) -> None:
        on_all_ranks(is_main, lambda: directory.mkdir(parents=True), f"making {directory}")
        lora = plan.job.lora
        weight_map, files = write_state(state, directory, is_main, plan.model, lora, shard_bytes=shard_bytes)
        manifest = Manifest(
            counters=counters,
            model=plan.model,
            files=files,
            weight_map=weight_map,
            kinds=state.kinds,
            optimizer=plan.job.optimizer.name,
            lora=lora,
            world_size=dist.get_world_size(),
            scalars=state.scalars,
        )
        on_all_ranks(is_main, lambda: write_manifest(directory, manifest), f"writing {directory}")

    return write


def export(
    engine: Engine, directory: Path, plan: Plan, counters: Counters, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Collective. Write the engine's state into a new directory."""
    captured(engine, plan, counters, copy=False, shard_bytes=shard_bytes)(directory)


def load(engine: Engine, directory: Path, plan: Plan, same_layout: bool = False) -> Counters:
    """Collective. Set the engine's state from a checkpoint of any layout; ``same_layout``: bit for bit."""
    checkpoint = Checkpoint(directory)
    reading = f"reading {directory}"
    on_all_ranks(True, lambda: checkpoint.verify(share=True), reading)
    on_all_ranks(engine.is_main, checkpoint.refuse_unlisted, reading)
    on_all_ranks(True, lambda: check_state(checkpoint, engine.optimizer_name, plan.model, plan.job.lora), reading)
    load_state(engine, checkpoint, same_layout)
    return checkpoint.manifest.counters


def on_disk(spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's tensors under the names that a directory has for them: each matrix of each expert its own."""
    return {
        each: part
        for name, tensor in tensors.items()
        for each, part in split_experts(spec, name, tensor)
        if part is not None
    }


def change(path: Path, edit: Any) -> None:
    """Let ``edit`` change the content of a file of torch.save that a test wrote."""
    loaded = torch.load(path, weights_only=False)
    edit(loaded)
    torch.save(loaded, path)


def edit(path: Path, new: Callable[[bytes], bytes]) -> None:
    """Let ``new`` change the bytes of a file."""
    path.write_bytes(new(path.read_bytes()))


def flipped(content: bytes) -> bytes:
    """With another bit in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
