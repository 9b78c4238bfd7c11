"""What a DeepSpeed configuration costs in memory and time, by the cost model; they speak where a model is given, and of
whole layouts where a cluster is too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import get_args

from kit.cost.estimate import predict
from kit.cost.hardware import usable_gib
from kit.cost.memory.deepspeed_sizes import buffer_sizes, least_param_buffer
from kit.cost.memory.offload import HOST_SHARE, host_ram_gib_per_node
from kit.cost.memory.peak import peak_gib
from kit.cost.model.params import count
from kit.cost.workload import Workload
from kit.diagnose.lint.batch_rules import data_parallel_size
from kit.diagnose.lint.config import Config, setting, truth
from kit.diagnose.lint.finding import Finding, Severity
from kit.diagnose.lint.rule import Rule, check
from kit.errors import KitError
from kit.specs.job import JobSpec, Precision
from kit.specs.layout import ZERO_KEYS, Layout, Offload
from kit.units import GIB

NEEDS_BOTH = "memory needs both a model and GPUs"
WORTH_SAYING = 1.1
"""Times the step of a layout beside it: less is within the error of a prediction."""
DEFAULT_BUCKET = 5e8
"""Elements (runtime/zero/config.py)."""


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


@check(
    "deepspeed",
    Rule("does-not-fit", "ds, with a model and GPUs", "more memory than a GPU has", "out of memory at the first step"),
    Rule(
        "host-ram",
        "ds, with a model and GPUs",
        "more offloaded than a node's host memory holds, pinned or not",
        "killed by the kernel, or no page can be locked",
    ),
    Rule("memory-not-judged", "ds, accelerate, script", "why nothing is said of memory", "silence is no judgement"),
)
def memory(config: Config) -> Iterator[Finding]:
    """Whether the model fits, and whether the host can hold what is offloaded."""
    work = _described(config)
    if isinstance(work, str):
        if config.model is not None or config.cluster is not None:
            yield config.finding("memory-not-judged", "note", "", work, "kit memory judges a layout by itself")
        return
    model, cluster, layout = work.model, work.cluster, work.layout
    moved = [name for name in ("optimizer", "param") if getattr(layout, f"offload_{name}") != "none"]
    if moved:
        needed = host_ram_gib_per_node(work)
        there = cluster.host_ram_gib
        pinned = any(config.on(f"zero_optimization.offload_{name}.pin_memory") for name in moved)
        if there is not None and needed > HOST_SHARE * there:
            yield config.finding(
                "host-ram",
                "error",
                f"zero_optimization.offload_{moved[0]}",
                f"needs {needed:.0f} GiB of host memory a node{', pinned and never swapped out' if pinned else ''}, "
                f"and {cluster.name} has {there:.0f}",
                "offload to nvme, or use more nodes",
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
    """What the configuration pays in time for memory that it does not need, and the step that is predicted."""
    work = _described(config)
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
            break  # the next would be measured against the same step
    largest, longest_s = max(now.step_time_components_s.items(), key=lambda item: item[1])
    peak = peak_gib(work)
    yield config.finding(
        "prediction",
        "note",
        "",
        f"{_batch(work)} on {cluster.num_gpus} {cluster.gpu.name}: about {peak:.0f} GiB a GPU, "
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
    """(rule, key, words, layout) of neighbours that keep more on the GPU and send less."""
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
    """swap_tensor/partitioned_param_swapper.py, get_buffer asserts that a rank's part of a weight fits in one."""
    work = _described(config)
    if isinstance(work, str) or work.layout.offload_param != "nvme":
        return
    least, size = least_param_buffer(work.model, work.layout), work.layout.param_buffer_size
    if size is not None and size < least:
        key = "zero_optimization.offload_param.buffer_size"
        yield config.finding(
            "buffer-size",
            "error",
            key if config.has(key) else "zero_optimization.offload_param",
            f"a buffer of {size:,} elements; a rank's part of the largest weight of {work.model.name} has {least:,}",
            f"write {least:,} or more".replace(",", ""),
            setting(key, least),
        )


def _checkpointing(layout: Layout) -> str:
    return f"with{'' if layout.recompute == 'full' else 'out'} gradient checkpointing"


def _described(config: Config) -> Workload | str:
    """What is known of the run; where memory cannot be judged, why."""
    if config.model is None or config.cluster is None:
        return NEEDS_BOTH
    layout = _fsdp_layout(config) if config.has("distributed_type") else _layout(config)
    if isinstance(layout, str):
        return layout
    job = JobSpec(
        precision=_precision(config),
        seq_length=config.given.seq_length or min(4096, config.model.max_position_embeddings),
        global_batch_size=layout.global_batch_size,
    )
    return Workload(model=config.model, cluster=config.cluster, job=job, layout=layout)


def _precision(config: Config) -> Precision:
    mixed = config.get("mixed_precision")
    if mixed in ("fp16", "bf16"):
        return "fp16" if mixed == "fp16" else "bf16"
    if config.on("fp16.enabled"):
        return "fp16"
    return "bf16" if config.on("bf16.enabled") or config.get("bf16.enabled") == "auto" else "fp32"


def _layout(config: Config) -> Layout | str:
    """Layout of a DeepSpeed configuration, with the sizes in it."""
    ranks, stage = data_parallel_size(config), config.stage
    if ranks is None or stage is None or not 0 <= stage <= 3:
        return "the number of ranks or the ZeRO stage is not a number here"
    if config.number("tensor_parallel.autotp_size") or config.number("sequence_parallel_size"):
        return "the cost model has no figures for a Hugging Face model whose tensors or sequences are split"
    offload = {
        f"offload_{name}": config.get(f"zero_optimization.offload_{name}.device", "none")
        for name in ("optimizer", "param")
    }
    if any(device not in get_args(Offload) for device in offload.values()):
        return f"offload to {' and '.join(map(str, offload.values()))} is not known here"
    layout = Layout(
        engine="deepspeed",
        implementation="huggingface",
        dp=ranks,
        zero_stage=stage,
        recompute="full" if config.given.gradient_checkpointing else "none",
        micro_batch_size=max(1, int(config.number("train_micro_batch_size_per_gpu") or 1)),
        gradient_accumulation_steps=max(1, int(config.number("gradient_accumulation_steps") or 1)),
        **offload,
    )
    return layout.with_sizes(_sizes(config, layout))


_DEFAULT_SIZES = {
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_max_live_parameters": 1e9,
    "stage3_param_persistence_threshold": 1e5,
    "sub_group_size": 1e9,
    "optimizer_buffer_count": 4,
    "param_buffer_count": 5,
    "param_buffer_size": 1e8,
}
"""DeepSpeed's own (runtime/zero/config.py, offload_config.py), by the layout's names."""
LARGEST_SIZE = 10**15


def _sizes(config: Config, layout: Layout) -> dict[str, int | None]:
    """Every size of DeepSpeed that this stage and offload read: what stands in the file; what the Trainer and
    accelerate write for "auto" (hidden size squared, nine tenths of it, ten hidden sizes); DeepSpeed's default."""
    assert config.model is not None
    hidden = config.model.hidden_size
    filled = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": 0.9 * hidden * hidden,
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    sizes: dict[str, int | None] = {}
    for name in buffer_sizes(config.model, config.cluster, layout) if config.cluster else ():
        key = f"zero_optimization.{ZERO_KEYS[name]}"
        plain = key.replace("stage3_", "")  # DeepSpeed takes both names
        value = next((v for v in (config.number(key), config.number(plain)) if v is not None), None)
        if value is None and "auto" in (config.get(key), config.get(plain)) and config.reader != "deepspeed":
            value = filled.get(name)
        least = 1 if name.endswith("count") else 0
        sizes[name] = int(min(max(_DEFAULT_SIZES[name] if value is None else value, least), LARGEST_SIZE))
    return sizes


_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0}
"""FSDP1's sharding strategies, by name or number, as stages."""


def _fsdp_layout(config: Config) -> Layout | str:
    """Layout of accelerate's YAML without DeepSpeed: FSDP and DDP."""
    kind, ranks = config.get("distributed_type"), data_parallel_size(config)
    if kind not in ("FSDP", "MULTI_GPU") or ranks is None:
        return f"the cost model has no figures for distributed_type {kind} of accelerate"
    stage: int | None = 0
    if kind == "FSDP":
        if config.on("fsdp_config.fsdp_offload_params") or config.section("parallelism_config"):
            return "the cost model has no figures for FSDP with offload, or beside other kinds of parallelism"
        reshards = config.get("fsdp_config.fsdp_reshard_after_forward", True)
        strategy = str(config.get("fsdp_config.fsdp_sharding_strategy", "FULL_SHARD")).upper()
        second = config.number("fsdp_config.fsdp_version") == 2
        stage = (3 if truth(reshards) is not False else 2) if second else _STAGES.get(strategy)
    if stage is None:
        return f"the cost model has no figures for {config.get('fsdp_config.fsdp_sharding_strategy')}"
    saves = config.given.gradient_checkpointing or config.on("fsdp_config.fsdp_activation_checkpointing")
    return Layout(
        engine="torch",
        implementation="huggingface",
        dp=ranks,
        zero_stage=stage,
        recompute="full" if saves else "none",
    )
