"""Random weights on disk, and gloo processes that load them: what loading and streaming share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kit
from kit.emit.run_directory import write
from kit.engines.megatron.weights.random import RandomSource
from kit.specs.catalog import parse_cluster
from kit.specs.model import ModelSpec
from kit.specs.run import DataSpec, RunSpec
from kit.training.checkpoint.to_huggingface import write_hf
from kit.units import GIB
from tests.support.parameter_shapes import parameter_shapes
from tests.support.workers import pool


def write_model(model: ModelSpec, directory: Path, dtype: str) -> None:
    """A Hugging Face directory with random weights, a tensor at a time, 1 GiB a file."""
    write_hf(model, RandomSource(model, seed=0), directory, dtype, shard_bytes=GIB)


def measure(
    model: ModelSpec,
    job: kit.JobSpec,
    pins: kit.Pins,
    directory: Path,
    name: str,
    worker: Callable[..., dict[str, Any]],
) -> list[dict[str, Any]]:
    """What each rank of ``worker`` found on a plan for ``directory/model``, one process a sequence of the batch."""
    cluster = parse_cluster(f"{job.global_batch_size}xcpu")
    # The stand-in's 8 GiB are a convention; what counts here is the machine.
    cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, memory_gib=64.0))
    plan = kit.plan(model, cluster, job, pins.but(micro_batch_size=1))
    run = RunSpec(model_path=str(directory / "model"), data=DataSpec(train="none"))
    processes = pool(plan.layout.engine, cluster.num_gpus)
    try:
        return processes.run(worker, write(plan, run, directory / name), timeout_s=1500)
    finally:
        processes.close()


def sizes(model: ModelSpec) -> tuple[int, int]:
    """(all, the largest tensor) in bytes of fp32."""
    numbers = [4 * torch.Size(shape).numel() for shape in parameter_shapes(model).values()]
    return sum(numbers), max(numbers)
