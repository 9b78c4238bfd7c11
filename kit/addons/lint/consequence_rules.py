"""Rules of the memory and time of a DeepSpeed configuration, predicted by the cost model. Most need a model and a
cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from kit.addons.lint.config import AUTO, Config, setting
from kit.addons.lint.described import DEFAULT_SIZES, described, precision
from kit.addons.lint.finding import Finding, Severity
from kit.addons.lint.rule import Rule, check
from kit.cost.estimate import predict
from kit.cost.hardware import usable_gib
from kit.cost.memory.deepspeed_sizes import fits_twice, least_param_buffer, unsharded_bytes
from kit.cost.memory.offload import HOST_SHARE, host_ram_gib_per_node
from kit.cost.memory.peak import peak_gib
from kit.cost.model.params import count
from kit.cost.workload import Workload
from kit.errors import KitError
from kit.specs.layout import Layout
from kit.units import GIB, to_gib

WORTH_SAYING = 1.1
"""Smallest ratio of step times that is reported; less is within the error of a prediction."""


_BUCKET = "zero_optimization.reduce_bucket_size"


@check(
    "deepspeed",
    Rule(
        "bucket-memory",
        "ds, with a model",
        "buckets larger than all gradients, or of several GiB",
        "memory that nothing uses",
    ),
)
def bucket_memory(config: Config) -> Iterator[Finding]:
    """stage_1_and_2.py allocates the full reduce bucket, and a second one with overlap_comm."""
    elements = config.number(_BUCKET) or DEFAULT_SIZES["reduce_bucket_size"]
    copies = 2 if config.on("zero_optimization.overlap_comm") else 1
    gib = elements * copies * (4 if precision(config) == "fp32" else 2) / GIB
    weights = count(config.model).total if config.model else math.inf
    why, fix = f"{copies} bucket(s) of {elements:.0e} elements take {gib:.1f} GiB", "use 5e8 or less"
    if config.model is not None and elements > weights:
        why += f", more than all gradients of {config.model.name} together"
        fix = f"use at most {max(1, weights // 8):.0e}"
    else:
        why += "; links are full with a tenth"
    if config.stage in (1, 2) and config.get(_BUCKET) != AUTO and (elements > weights or gib > 4):
        at = _BUCKET if config.has(_BUCKET) else "zero_optimization.stage"
        yield config.finding("bucket-memory", "warning", at, why, fix)


@check(
    "deepspeed",
    Rule("does-not-fit", "ds, with a model and GPUs", "more memory than a GPU has", "out of memory at the first step"),
    Rule(
        "host-ram",
        "ds, with a model and GPUs",
        "more offloaded than a node's host memory holds, pinned or not, or more copied there while loading",
        "killed by the kernel, or no page can be locked",
    ),
    Rule("memory-not-judged", "ds, accelerate, script", "why nothing is said of memory", "silence is no judgement"),
)
def memory(config: Config) -> Iterator[Finding]:
    """Whether the model fits the GPU, and offloaded state the host."""
    work = described(config)
    if isinstance(work, str):
        if config.model is not None or config.cluster is not None:
            yield config.finding("memory-not-judged", "note", "", work, "kit memory judges a layout by itself")
        return
    model, cluster, layout = work.model, work.cluster, work.layout
    moved = [name for name in ("optimizer", "param") if getattr(layout, f"offload_{name}") != "none"]
    needed, there = host_ram_gib_per_node(work), cluster.host_ram_gib
    if moved and there is not None and needed > HOST_SHARE * there:
        pinned = any(config.on(f"zero_optimization.offload_{name}.pin_memory") for name in moved)
        why = (
            f"needs {needed:.0f} GiB of host memory a node{', pinned and never swapped out' if pinned else ''}, "
            f"and {cluster.name} has {there:.0f}"
        )
        key = f"zero_optimization.offload_{moved[0]}"
        yield config.finding("host-ram", "error", key, why, "offload to nvme, or use more nodes")
    if config.reader in ("trainer", "accelerate") and layout.zero_stage in (1, 2) and not fits_twice(work):
        # from_pretrained maps the files, and the model goes to the GPU before it is flat.
        each, ranks = 2 * to_gib(unsharded_bytes(work)), layout.world_size // cluster.num_nodes
        if there is not None and needed <= HOST_SHARE * there < needed + ranks * each:
            yield config.finding(
                "host-ram",
                "error",
                "zero_optimization.stage",
                f"a GPU has no room for the weights twice, so {ranks} processes make their flat copy in host memory: "
                f"{needed + ranks * each:.0f} GiB while they load, and {cluster.name} has {there:.0f}",
                "use stage 3, or kit train, whose weights take no memory before they are flat",
            )
    try:
        peak = peak_gib(work)
    except KitError as error:
        yield config.finding("memory-not-judged", "note", "", str(error).splitlines()[0], "choose what kit knows")
        return
    usable = usable_gib(cluster.gpu)
    if peak > usable:
        said = (
            f"{_batch(work)} peaks at about {peak:.0f} GiB {_checkpointing(layout)}; "
            f"{cluster.gpu.name} has {usable:.0f} usable"
        )
        fewer = peak_gib(work.with_layout(dataclasses.replace(layout, recompute="full")))
        severity: Severity = "warning" if fewer <= usable and layout.recompute == "none" else "error"
        yield config.finding(
            "does-not-fit",
            severity,
            "zero_optimization.stage",
            said,
            f"turn gradient checkpointing on (about {fewer:.0f} GiB)"
            if severity == "warning"
            else f"use a higher stage, offload or more GPUs (kit plan {model.name} --gpus … finds one)",
        )


@check(
    "deepspeed",
    Rule(
        "prediction",
        "ds, with a model and GPUs",
        "nothing wrong: memory, step and MFU that the cost model predicts",
        "its errors are in [accuracy.md](accuracy.md)",
    ),
)
def speed(config: Config) -> Iterator[Finding]:
    """The predicted step time, and settings that cost time to save memory that is not needed."""
    work = described(config)
    if isinstance(work, str):
        return
    cluster, layout = work.cluster, work.layout
    try:
        now = predict(work)
        usable = usable_gib(cluster.gpu)
        lighter = [
            (rule, key, words, predict(work.with_layout(other)))
            for rule, key, words, other in _lighter(layout)
            if peak_gib(work.with_layout(other)) <= usable
        ]
    except KitError:
        return
    for rule, key, words, other in lighter:
        ratio = now.step_time_s / other.step_time_s
        if ratio > WORTH_SAYING:
            yield config.finding(
                rule,
                "warning",
                f"zero_optimization.{key}",
                f"{_batch(work)} fits {words}, and a step then takes about {other.step_time_s:.2g} s; "
                f"now it takes {now.step_time_s:.2g}, {ratio:.1f} times as long",
                f"train {words}",
            )
            break  # the next setting would be compared with the same step
    largest, longest_s = max(now.step_time_components_s.items(), key=lambda item: item[1])
    peak = peak_gib(work)
    yield config.finding(
        "prediction",
        "note",
        "",
        f"{_batch(work)} on {layout.world_size} {cluster.gpu.name}: about {peak:.0f} GiB a GPU, "
        f"{now.step_time_s:.2g} s a step ({largest} {longest_s:.2g} s), {now.mfu:.0%} MFU",
        "kit plan looks for a better layout",
    )


@check(
    None,
    Rule(
        "offload-for-nothing",
        "ds, with a model and GPUs",
        "offload of state that fits on the GPUs",
        "a longer step, by the cost model",
    ),
    Rule(
        "stage-for-nothing",
        "ds, with a model and GPUs",
        "stage 3 where 1 or 2 fits and is faster",
        "weights gathered twice a micro batch, by the cost model",
    ),
)
def _lighter(layout: Layout) -> Iterator[tuple[str, str, str, Layout]]:
    """(rule, key, words, layout) of similar layouts that keep more state on the GPU and communicate less."""
    if layout.engine != "deepspeed":
        return
    bare = dataclasses.replace(layout, offload_optimizer="none", offload_param="none")
    if bare != layout:
        key = "offload_optimizer" if layout.offload_optimizer != "none" else "offload_param"
        yield "offload-for-nothing", key, "without offload", bare
    for stage in (1, 2):
        if layout.zero_stage == 3:
            yield "stage-for-nothing", "stage", f"at stage {stage}", dataclasses.replace(bare, zero_stage=stage)


def _batch(work: Workload) -> str:
    return f"{work.model.name} at {work.job.seq_length} tokens, micro batch {work.layout.micro_batch_size}"


@check(
    "deepspeed",
    Rule("buffer-size", "ds, with a model and GPUs", "an NVMe buffer below the largest weight", "stops the run"),
)
def buffer_size(config: Config) -> Iterator[Finding]:
    """swap_tensor/partitioned_param_swapper.py, get_buffer, asserts that a shard of a weight fits in a buffer."""
    work = described(config)
    if isinstance(work, str) or work.layout.offload_param != "nvme":
        return
    least, size = least_param_buffer(work.model, work.layout), work.layout.param_buffer_size
    if size is not None and size < least:
        key = "zero_optimization.offload_param.buffer_size"
        at = key if config.has(key) else "zero_optimization.offload_param"
        largest = f"a rank's part of the largest weight of {work.model.name} has {least:,}"
        why, fix = f"a buffer of {size:,} elements; {largest}", f"write {least} or more"
        yield config.finding("buffer-size", "error", at, why, fix, setting(key, least))


def _checkpointing(layout: Layout) -> str:
    return f"with{'' if layout.recompute == 'full' else 'out'} gradient checkpointing"
