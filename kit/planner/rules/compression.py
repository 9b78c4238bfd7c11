"""Rules of compressed collectives: DDP's communication hooks, DeepSpeed's data type, and ZeRO++ of its stage 3."""

from __future__ import annotations

from kit.cost.workload import Workload
from kit.planner.divisors import divisors, one_of
from kit.planner.rules.rule import rule
from kit.specs.layout import Layout


@rule("torch", "deepspeed")
def compression_has_a_hook(w: Workload) -> str | None:
    """Hooks belong to DDP (torch/distributed/algorithms/ddp_comm_hooks), communication_data_type to DeepSpeed's
    reductions; FSDP2 and Megatron have neither here."""
    layout, kind = w.layout, w.layout.gradient_compression
    ddp = layout.engine == "torch" and layout.zero_stage == 0
    if kind == "none" or ddp or (layout.engine == "deepspeed" and kind == "bf16"):
        return None
    return (
        f"gradient_compression={kind} on engine={layout.engine} with zero_stage={layout.zero_stage}; use engine=torch "
        "with zero_stage=0 (DDP), or ZeRO++ of engine=deepspeed (zero_quantized_gradients)"
    )


@rule("torch")
def compression_needs_ranks(w: Workload) -> str | None:
    """One rank sends no gradient."""
    kind = w.layout.gradient_compression
    if kind != "none" and w.layout.dp == 1 and w.layout.zero_stage == 0:
        return f"gradient_compression={kind} with dp=1: nothing is sent; leave it out"
    return None


@rule("deepspeed")
def compression_needs_fp32(w: Workload) -> str | None:
    """Gradients of bf16 and fp16 weights have 16 bits already."""
    if w.layout.gradient_compression == "bf16" and w.job.precision != "fp32":
        return (
            f"gradient_compression=bf16 with precision={w.job.precision} on engine=deepspeed, whose gradients are sent "
            "in 16 bits anyway; leave it out"
        )
    return None


def _zeropp(layout: Layout) -> str:
    """The keys of ZeRO++ that are on, as text; empty without any."""
    given = [f"{key}=true" for key in _QUANTIZED if getattr(layout, key)]
    return ", ".join([*given, *([f"zero_hpz={layout.zero_hpz}"] if layout.zero_hpz > 1 else [])])


def _quantized(layout: Layout) -> str | None:
    """The first of the two quantised collectives that is on."""
    return next((key for key in _QUANTIZED if getattr(layout, key)), None)


_QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")


@rule("deepspeed")
def zeropp_needs_zero_3(w: Workload) -> str | None:
    """ZeRO++ compresses what stage 3 sends: other stages read none of its keys, and say nothing (engine.py,
    _configure_zero_optimizer)."""
    layout = w.layout
    if layout.zero_stage != 3 and (given := _zeropp(layout)):
        return f"{given} with zero_stage={layout.zero_stage}: it is part of stage 3; use zero_stage=3"
    return None


@rule("deepspeed")
def zeropp_kernels(w: Workload) -> str | None:
    """op_builder/quantizer.py builds for CUDA."""
    if w.cluster.gpu.device == "cpu" and (key := _quantized(w.layout)):
        return f"{key}=true on {w.cluster.gpu.name}: its kernels run on CUDA only; leave it out"
    return None


@rule("deepspeed")
def zeropp_precision(w: Workload) -> str | None:
    """The quantiser's kernels read fp16 and bf16."""
    if w.job.precision == "fp32" and (key := _quantized(w.layout)):
        return f"{key}=true with precision=fp32: its kernels compute in 16 bits; use bf16 or fp16"
    return None


@rule("deepspeed")
def zeropp_groups(w: Workload) -> str | None:
    """utils/groups.py makes ZeRO++'s groups of all ranks."""
    layout = w.layout
    if (layout.cp > 1 or layout.tp > 1) and (given := _zeropp(layout)):
        return f"{given} with tp={layout.tp}, cp={layout.cp}: its groups are made of all ranks; use tp=1 and cp=1"
    return None


@rule("deepspeed")
def hpz_divides_ranks(w: Workload) -> str | None:
    """utils/groups.py, _create_zero_param_parallel_group: neighbouring ranks, and an assertion that they divide. A
    second copy pays where its ranks share a node."""
    layout, node = w.layout, w.cluster.gpus_per_node
    if layout.zero_stage == 3 and (node % layout.zero_hpz or layout.dp % layout.zero_hpz):
        return (
            f"zero_hpz={layout.zero_hpz} does not divide the {node} GPUs of a node and dp={layout.dp}; "
            f"use {one_of(d for d in divisors(node) if layout.dp % d == 0)}"
        )
    return None


@rule("deepspeed")
def hpz_without_offload(w: Workload) -> str | None:
    """partition_parameters.py, remote_device: the second copy has the device of the first."""
    layout = w.layout
    if layout.zero_hpz > 1 and layout.zero_stage == 3 and layout.offload_param != "none":
        return (
            f"zero_hpz={layout.zero_hpz} with offload_param={layout.offload_param}: the second copy would be offloaded "
            "too (partition_parameters.py, remote_device); use one of them"
        )
    return None


@rule("deepspeed")
def quantized_gradients_need_nodes(w: Workload) -> str | None:
    """stage3.py, __avg_scatter_grads: with one node they are reduced as ever, without a word; utils/groups.py makes the
    groups of whole nodes."""
    if w.layout.zero_quantized_gradients and w.cluster.num_nodes == 1:
        return "zero_quantized_gradients=true on one node, where DeepSpeed ignores it; leave it out"
    return None
