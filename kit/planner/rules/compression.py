"""Rules of compressed collectives: DDP's communication hooks, DeepSpeed's communication_data_type, and ZeRO++."""

from __future__ import annotations

from kit.cost.workload import Workload
from kit.planner.rules.rule import rule
from kit.specs.layout import Layout, divisors
from kit.specs.text import one_of


@rule(
    "torch",
    "deepspeed",
    message=lambda w: (
        f"gradient_compression={w.layout.gradient_compression} on engine={w.layout.engine} with "
        f"zero_stage={w.layout.zero_stage}; use engine=torch with zero_stage=0 (DDP), or ZeRO++ of engine=deepspeed "
        "(zero_quantized_gradients)"
    ),
)
def compression_has_a_hook(w: Workload) -> bool:
    """Hooks belong to DDP (torch/distributed/algorithms/ddp_comm_hooks), communication_data_type to DeepSpeed's
    reductions; FSDP2 and Megatron have neither here."""
    layout, kind = w.layout, w.layout.gradient_compression
    ddp = layout.engine == "torch" and layout.zero_stage == 0
    return kind != "none" and not ddp and (layout.engine, kind) != ("deepspeed", "bf16")


@rule(
    "torch",
    message=lambda w: f"gradient_compression={w.layout.gradient_compression} with dp=1: nothing is sent; leave it out",
)
def compression_needs_ranks(w: Workload) -> bool:
    """One rank sends no gradient."""
    return w.layout.gradient_compression != "none" and w.layout.dp == 1 and w.layout.zero_stage == 0


@rule(
    "deepspeed",
    message=lambda w: (
        f"gradient_compression=bf16 with precision={w.job.precision} on engine=deepspeed, whose gradients are sent "
        "in 16 bits anyway; leave it out"
    ),
)
def compression_needs_fp32(w: Workload) -> bool:
    """Gradients of bf16 and fp16 weights have 16 bits already."""
    return w.layout.gradient_compression == "bf16" and w.job.precision != "fp32"


def _zeropp(layout: Layout) -> str:
    """The keys of ZeRO++ that are on, as text; empty without any."""
    given = [f"{key}=true" for key in _QUANTIZED if getattr(layout, key)]
    return ", ".join([*given, *([f"zero_hpz={layout.zero_hpz}"] if layout.zero_hpz > 1 else [])])


def _quantized(layout: Layout) -> str | None:
    """The first of the two quantised collectives that is on."""
    return next((key for key in _QUANTIZED if getattr(layout, key)), None)


_QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")


@rule(
    "deepspeed",
    message=lambda w: (
        f"{_zeropp(w.layout)} with zero_stage={w.layout.zero_stage}: it is part of stage 3; use zero_stage=3"
    ),
)
def zeropp_needs_zero_3(w: Workload) -> bool:
    """ZeRO++ compresses stage 3's collectives. Other stages ignore its keys silently (engine.py,
    _configure_zero_optimizer)."""
    return w.layout.zero_stage != 3 and _zeropp(w.layout) != ""


@rule(
    "deepspeed",
    message=lambda w: (
        f"{_quantized(w.layout)}=true on {w.cluster.gpu.name}: its kernels run on CUDA only; leave it out"
    ),
)
def zeropp_kernels(w: Workload) -> bool:
    """op_builder/quantizer.py builds for CUDA."""
    return w.cluster.gpu.device == "cpu" and _quantized(w.layout) is not None


@rule(
    "deepspeed",
    message=lambda w: (
        f"{_quantized(w.layout)}=true with precision=fp32: its kernels compute in 16 bits; use bf16 or fp16"
    ),
)
def zeropp_precision(w: Workload) -> bool:
    """The quantiser's kernels read fp16 and bf16."""
    return w.job.precision == "fp32" and _quantized(w.layout) is not None


@rule(
    "deepspeed",
    message=lambda w: (
        f"{_zeropp(w.layout)} with tp={w.layout.tp}, cp={w.layout.cp}: its groups are made of all ranks; use tp=1 and "
        "cp=1"
    ),
)
def zeropp_groups(w: Workload) -> bool:
    """utils/groups.py makes ZeRO++'s groups of all ranks."""
    return (w.layout.cp > 1 or w.layout.tp > 1) and _zeropp(w.layout) != ""


@rule(
    "deepspeed",
    message=lambda w: (
        f"zero_hpz={w.layout.zero_hpz} does not divide the {w.cluster.gpus_per_node} GPUs of a node and "
        f"dp={w.layout.dp}; use {one_of(d for d in divisors(w.cluster.gpus_per_node) if w.layout.dp % d == 0)}"
    ),
)
def hpz_divides_ranks(w: Workload) -> bool:
    """utils/groups.py, _create_zero_param_parallel_group, asserts that hpZ's groups of adjacent ranks divide the world.
    hpZ gains time only if the ranks of a group share a node."""
    hpz = w.layout.zero_hpz
    return w.layout.zero_stage == 3 and (w.cluster.gpus_per_node % hpz != 0 or w.layout.dp % hpz != 0)


@rule(
    "deepspeed",
    message=lambda w: (
        f"zero_hpz={w.layout.zero_hpz} with offload_param={w.layout.offload_param}: the second copy would be offloaded "
        "too (partition_parameters.py, remote_device); use one of them"
    ),
)
def hpz_without_offload(w: Workload) -> bool:
    """partition_parameters.py, remote_device: the second copy has the device of the first."""
    return w.layout.zero_hpz > 1 and w.layout.zero_stage == 3 and w.layout.offload_param != "none"


@rule("deepspeed", message="zero_quantized_gradients=true on one node, where DeepSpeed ignores it; leave it out")
def quantized_gradients_need_nodes(w: Workload) -> bool:
    """stage3.py, __avg_scatter_grads: on one node DeepSpeed silently reduces gradients without compression.
    utils/groups.py makes groups of whole nodes."""
    return w.layout.zero_quantized_gradients and w.cluster.num_nodes == 1
