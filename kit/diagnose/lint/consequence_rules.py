"""What a DeepSpeed configuration costs, from the cost model; they speak where a model (and a cluster) is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kit.cost.efficiency import usable_gib
from kit.cost.memory import peak_gib
from kit.cost.offload import host_ram_gib_per_node
from kit.cost.params import count
from kit.diagnose.lint.batch_rules import data_parallel_size
from kit.diagnose.lint.config import Config
from kit.diagnose.lint.finding import Finding
from kit.errors import KitError
from kit.specs.job import JobSpec, Precision
from kit.specs.layout import Layout
from kit.units import GIB

DEFAULT_BUCKET = 5e8
"""Elements (runtime/zero/config.py)."""


def bucket_memory(config: Config) -> Iterator[Finding]:
    """stage_1_and_2.py allocates a reduce bucket whole, a second one with overlap_comm."""
    if config.stage not in (1, 2):
        return
    key = "zero_optimization.reduce_bucket_size"
    if config.get(key) == "auto":
        return
    elements = config.number(key) or DEFAULT_BUCKET
    copies = 2 if config.on("zero_optimization.overlap_comm") else 1
    gib = elements * copies * (4 if _precision(config) == "fp32" else 2) / GIB
    at = key if config.has(key) else "zero_optimization.stage"
    if config.model is not None and elements > count(config.model).total:
        yield config.finding(
            "bucket-memory",
            "warning",
            at,
            f"{copies} bucket(s) of {elements:.0e} elements take {gib:.1f} GiB, more than all gradients of "
            f"{config.model.name} together",
            f"use at most {max(1, count(config.model).total // 8):.0e}",
        )
    elif gib > 4:
        yield config.finding(
            "bucket-memory",
            "warning",
            at,
            f"{copies} bucket(s) of {elements:.0e} elements take {gib:.1f} GiB; links are full with a tenth",
            "use 5e8 or less",
        )


def memory(config: Config) -> Iterator[Finding]:
    """Whether the model fits, and whether the host can hold what is offloaded."""
    layout = _layout(config)
    if config.model is None or config.cluster is None or layout is None:
        return
    job = JobSpec(
        precision=_precision(config),
        seq_length=min(4096, config.model.max_position_embeddings),
        global_batch_size=layout.global_batch_size,
    )
    if config.on("zero_optimization.offload_optimizer.pin_memory") or layout.offload_optimizer != "none":
        needed = host_ram_gib_per_node(config.model, config.cluster, layout, job.precision)
        there = config.cluster.host_ram_gib
        if there is not None and needed > 0.9 * there:
            yield config.finding(
                "host-ram",
                "error",
                "zero_optimization.offload_optimizer",
                f"needs {needed:.0f} GiB of host memory a node, which cannot be swapped out while pinned, and "
                f"{config.cluster.name} has {there:.0f}",
                "offload to nvme, or use more nodes",
            )
    try:
        peak = peak_gib(config.model, config.cluster, job, layout)
    except KitError:
        return  # a model that the cost model does not know: nothing to say
    usable = usable_gib(config.cluster.gpu)
    said = (
        f"{config.model.name} with {layout.micro_batch_size} sequences of {job.seq_length} tokens peaks at about "
        f"{peak:.0f} GiB without gradient checkpointing; {config.cluster.gpu.name} has {usable:.0f} usable"
    )
    if peak > usable:
        fewer = _with_recompute(config, job, layout)
        severity = "warning" if fewer is not None and fewer <= usable else "error"
        yield config.finding(
            "does-not-fit",
            severity,  # type: ignore[arg-type]  # one of two literals
            "zero_optimization.stage",
            said,
            f"turn gradient checkpointing on (about {fewer:.0f} GiB)"
            if severity == "warning"
            else f"use a higher stage, offload or more GPUs (kit plan {config.model.name} --gpus … finds one)",
        )


def _with_recompute(config: Config, job: JobSpec, layout: Layout) -> float | None:
    assert config.model is not None
    assert config.cluster is not None
    return peak_gib(config.model, config.cluster, job, dataclasses.replace(layout, recompute="full"))


def _precision(config: Config) -> Precision:
    if config.on("fp16.enabled"):
        return "fp16"
    return "bf16" if config.on("bf16.enabled") or config.get("bf16.enabled") == "auto" else "fp32"


def _layout(config: Config) -> Layout | None:
    ranks, stage = data_parallel_size(config), config.stage
    if ranks is None or stage is None or not 0 <= stage <= 3:
        return None
    if config.number("tensor_parallel.autotp_size") or config.number("sequence_parallel_size"):
        return None
    offload = {
        f"offload_{name}": config.get(f"zero_optimization.offload_{name}.device", "none")
        for name in ("optimizer", "param")
    }
    return Layout(
        engine="deepspeed",
        implementation="huggingface-sdpa",
        dp=ranks,
        zero_stage=stage,
        micro_batch_size=max(1, int(config.number("train_micro_batch_size_per_gpu") or 1)),
        gradient_accumulation_steps=max(1, int(config.number("gradient_accumulation_steps") or 1)),
        **offload,
    )
