"""Rules of DeepSpeed 0.19.8: precision, model parallelism combined with ZeRO, and offload.

ZeRO combines with three kinds of model parallelism: DeepSpeed's automatic tensor parallelism of Hugging Face layers
(AutoTP: tp with implementation=huggingface), megatron-core's tensor parallelism (tp with implementation=local), and
sequence parallelism by all-to-alls over heads (Ulysses: cp with cp_comm_type=a2a).
"""

from __future__ import annotations

from operator import attrgetter

from kit.cost.memory.deepspeed_sizes import buffer_sizes, least_param_buffer
from kit.cost.memory.offload import HOST_SHARE, host_ram_gib_per_node, nvme_gib_per_node
from kit.cost.workload import Workload
from kit.planner.rules.common import runs_megatron_layers
from kit.planner.rules.megatron_layers import whole_tp
from kit.planner.rules.rule import rule
from kit.specs.families import families_where
from kit.specs.layout import ZERO_KEYS
from kit.specs.text import listed

# ---------------------------------------------------------------- precision


@rule(
    "deepspeed",
    message=lambda w: (
        f"precision=fp16 on {w.cluster.gpu.name}: DeepSpeed refuses it on CPU processes; use bf16 or fp32"
    ),
)
def fp16_needs_cuda(w: Workload) -> bool:
    """engine.py, _do_sanity_check, refuses fp16 if the accelerator does not support it, as on CPU."""
    return w.job.precision == "fp16" and w.cluster.gpu.device == "cpu"


@rule(
    "deepspeed",
    message=(
        "precision=fp16 with zero_stage=0: DeepSpeed then divides gradients by a loss scale that it never "
        "multiplied them with; use zero_stage=1, 2 or 3"
    ),
)
def fp16_needs_zero(w: Workload) -> bool:
    """engine.py, backward, scales the loss only for ZeRO's optimizers, but at stage 0 fp16/unfused_optimizer.py and
    fused_optimizer.py still divide gradients by the scale. Adam hides this; clipping and small gradients do not."""
    return w.job.precision == "fp16" and w.layout.zero_stage == 0


@rule(
    "deepspeed",
    message=lambda w: f"autocast=true with precision={w.job.precision}: it computes in bf16; use precision=bf16",
)
def autocast_precision(w: Workload) -> bool:
    """kit supports DeepSpeed's autocast in bf16 only."""
    return w.layout.autocast and w.job.precision != "bf16"


@rule(
    "deepspeed",
    message="autocast=true with zero_quantized_weights=true, which DeepSpeed refuses together; use one of them",
)
def autocast_quantized_weights(w: Workload) -> bool:
    """torch_autocast.py, _validate_auto_cast_settings, refuses autocast with quantised weights."""
    return w.layout.autocast and w.layout.zero_quantized_weights


@rule(
    "deepspeed",
    message=lambda w: (
        f"autocast=true with zero_stage={w.layout.zero_stage} and implementation={w.layout.implementation}: it is for "
        "ZeRO on Hugging Face layers; use zero_stage=1, 2 or 3 with huggingface, or engine=torch"
    ),
)
def autocast_needs_zero(w: Workload) -> bool:
    """Autocast needs a ZeRO optimizer, which has the fp32 weights. Megatron's layers do not run under autocast."""
    return w.layout.autocast and (w.layout.zero_stage == 0 or runs_megatron_layers(w.layout))


# ---------------------------------------------------------------- ways to split


@rule(
    "deepspeed",
    message=lambda w: (
        f"pp={w.layout.pp} on engine=deepspeed: "
        + (
            f"zero_stage={w.layout.zero_stage} excludes pipeline parallelism"
            if w.layout.zero_stage >= 2
            else "its PipelineModule takes no Hugging Face model"
        )
        + "; use pp=1, or engine=megatron with zero_stage 0 or 1"
    ),
)
def deepspeed_pipeline(w: Workload) -> bool:
    """runtime/pipe/module.py takes a list of layers, which transformers' models are not, and pipe/engine.py asserts
    ``zero_optimization_stage() < ZeroStageEnum.gradients``."""
    return w.layout.pp > 1


@rule(
    "deepspeed",
    message=(
        "sp=true on engine=deepspeed with Hugging Face layers, which have no sequence parallelism; use "
        "implementation=local with tp>1, or leave it out"
    ),
)
def sp_needs_megatron_layers(w: Workload) -> bool:
    """Sequence parallelism is part of megatron-core's layers."""
    return w.layout.sp and not runs_megatron_layers(w.layout)


@rule(
    "deepspeed",
    message=lambda w: (
        f"implementation={w.layout.implementation} on engine=deepspeed with tp=1: Megatron's layers are there "
        "for their tensor parallelism; use tp>1, or huggingface"
    ),
)
def megatron_layers_need_tp(w: Workload) -> bool:
    """Without tensor parallelism Hugging Face's layers do the same, with more features."""
    return runs_megatron_layers(w.layout) and w.layout.tp == 1


@rule(
    "deepspeed",
    message=lambda w: (
        f"tp={w.layout.tp} with the experts of {w.model.name} on engine=deepspeed was not tested; use "
        "engine=megatron, or tp=1"
    ),
)
def tp_without_experts(w: Workload) -> bool:
    """Neither AutoTP nor ZeRO over Megatron's layers was tried with experts."""
    return w.layout.tp > 1 and w.model.num_experts > 0


@rule(
    "deepspeed",
    message=lambda w: (
        f"tp={w.layout.tp} with offload_optimizer={w.layout.offload_optimizer}, offload_param={w.layout.offload_param} "
        "on engine=deepspeed: NVMe was not tested with tensor parallelism; use tp=1, or offload to cpu"
    ),
)
def tp_without_nvme(w: Workload) -> bool:
    """Swapping to NVMe was not tried with split weights."""
    return w.layout.tp > 1 and "nvme" in (w.layout.offload_optimizer, w.layout.offload_param)


@rule(
    "deepspeed",
    message=lambda w: (
        f"tp={w.layout.tp} on engine=deepspeed with {w.model.name}, whose layers AutoTP cannot split: it knows "
        f"{listed(families_where('autotp'))}; use engine=megatron, or implementation=local"
    ),
)
def autotp_family(w: Workload) -> bool:
    """module_inject/tp_plan_converter.py and auto_tp.py."""
    return not (w.layout.tp == 1 or runs_megatron_layers(w.layout) or w.model.traits.autotp or w.model.num_experts)


@rule(
    "deepspeed",
    message=lambda w: (
        f"tp={w.layout.tp} does not divide num_key_value_heads={w.model.num_key_value_heads} of {w.model.name}; "
        f"use {whole_tp(w, divides_kv_heads=True)}"
    ),
)
def autotp_divides_kv_heads(w: Workload) -> bool:
    """With more ranks than key/value heads, AutoTP leaves some ranks without attention (engine.py,
    _apply_autotp_partitioning, only warns)."""
    return not runs_megatron_layers(w.layout) and w.model.num_key_value_heads % w.layout.tp != 0


# ---------------------------------------------------------------- offload


@rule(
    "deepspeed",
    message=lambda w: (
        f"offload_param={w.layout.offload_param} with zero_stage={w.layout.zero_stage}: only stage 3 partitions "
        "parameters; use 3"
    ),
)
def offload_param_needs_zero_3(w: Workload) -> bool:
    """Only stage3.py, _configure_offloading, reads the key; other stages ignore it silently."""
    return w.layout.offload_param != "none" and w.layout.zero_stage != 3


@rule(
    "deepspeed",
    message="offload_optimizer=cpu with zero_stage=0: only the ZeRO optimizers offload; use zero_stage=1, 2 or 3",
)
def offload_optimizer_needs_zero(w: Workload) -> bool:
    """Only the ZeRO optimizers read offload_optimizer."""
    return w.layout.offload_optimizer == "cpu" and w.layout.zero_stage == 0


@rule(
    "deepspeed",
    message=lambda w: (
        f"offload_optimizer=nvme with zero_stage={w.layout.zero_stage}, which keeps it in host memory: only "
        "stage 3 swaps; use zero_stage=3, or offload_optimizer=cpu"
    ),
)
def nvme_needs_zero_3(w: Workload) -> bool:
    """Stages 1 and 2 treat nvme as cpu (engine.py, zero_cpu_offload)."""
    return w.layout.offload_optimizer == "nvme" and w.layout.zero_stage != 3


@rule()
def host_ram(w: Workload) -> str | None:
    """Offload needs a known host memory size that is large enough."""
    cluster = w.cluster
    needed = host_ram_gib_per_node(w)
    if needed and cluster.host_ram_gib is None:
        return (
            f"offload to the host of {cluster.name}, whose memory is unknown; needs {needed:.0f} GiB a node: "
            "give cluster.host_ram_gib"
        )
    usable = HOST_SHARE * (cluster.host_ram_gib or 0.0)
    if needed > usable:
        return (
            f"offload needs {needed:.0f} GiB of host memory a node, and of the {cluster.host_ram_gib:.0f} GiB of "
            f"{cluster.name} {usable:.0f} are usable; offload to nvme, or use more nodes"
        )
    return None


@rule("deepspeed")
def nvme(w: Workload) -> str | None:
    """NVMe offload needs known disks that are large enough. The run states where they are mounted (run.nvme_path)."""
    cluster = w.cluster
    needed = nvme_gib_per_node(w)
    if needed and cluster.nvme_gib is None:
        return (
            f"offload to NVMe of {cluster.name}, whose disks are unknown; needs {needed:.1f} GiB a node: "
            "give cluster.nvme_gib"
        )
    if needed > (cluster.nvme_gib or 0.0):
        return (
            f"offload needs {needed:.1f} GiB of NVMe a node, and {cluster.name} has {cluster.nvme_gib:.1f}; "
            "use more nodes, or offload to cpu"
        )
    return None


# ---------------------------------------------------------------- sizes of buffers

_sizes = attrgetter(*ZERO_KEYS)
_NO_SIZES = (None,) * len(ZERO_KEYS)


@rule("deepspeed")
def size_is_read(w: Workload) -> str | None:
    """runtime/zero/config.py accepts every size at every stage, but stage_1_and_2.py, stage3.py and swap_tensor each
    read only some."""
    if _sizes(w.layout) == _NO_SIZES:
        return None
    read = set(buffer_sizes(w.model, w.cluster, w.layout.but(**dict.fromkeys(ZERO_KEYS))))
    if w.layout.zero_stage == 3:
        read.add("sub_group_size")
    unread = [name for name in ZERO_KEYS if getattr(w.layout, name) is not None and name not in read]
    if not unread:
        return None
    given = ", ".join(f"{name}={getattr(w.layout, name)}" for name in unread)
    return (
        f"{given} with zero_stage={w.layout.zero_stage}, offload_optimizer={w.layout.offload_optimizer}, "
        f"offload_param={w.layout.offload_param}: nothing reads it there; leave it out"
    )


@rule(
    "deepspeed",
    message=lambda w: (
        f"optimizer_buffer_count={w.layout.optimizer_buffer_count}: a master weight, two moments and a gradient are in "
        "memory at once; use 4 or more"
    ),
)
def optimizer_buffers_suffice(w: Workload) -> bool:
    """partitioned_optimizer_swapper.py, swap_in_optimizer_state: one buffer per state tensor of Adam, one for
    gradients."""
    return w.layout.optimizer_buffer_count is not None and w.layout.optimizer_buffer_count < 4


@rule(
    "deepspeed",
    message=lambda w: (
        f"param_buffer_size={w.layout.param_buffer_size}: a rank's part of the largest weight of {w.model.name} has "
        f"{least_param_buffer(w.model, w.layout)} elements; use {least_param_buffer(w.model, w.layout)} or more, or "
        "leave it out"
    ),
)
def param_buffer_holds_a_weight(w: Workload) -> bool:
    """partitioned_param_swapper.py, get_buffer, asserts that a shard of every weight fits in a buffer."""
    size = w.layout.param_buffer_size
    return size is not None and size < least_param_buffer(w.model, w.layout)


NODE_CAPACITY = frozenset({"host_ram", "nvme"})
"""Rules that depend on the capacity of a node."""
