"""Checkpoints of an engine without a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from kit.engines.collective import on_all_ranks
from kit.engines.io.sharded_safetensors import DEFAULT_SHARD_BYTES
from kit.engines.protocol import Engine
from kit.planner.plan import Plan
from kit.training.checkpoint.manifest import Checkpoint, Manifest
from kit.training.checkpoint.store import check_state, load_state, state_of, write_manifest, write_state
from kit.training.counters import Counters


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
