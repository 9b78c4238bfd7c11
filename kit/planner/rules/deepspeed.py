"""Rules of DeepSpeed 0.19.8: which stages offload, compress, and split what; and who else may be told of ZeRO++.

Three ways to split a model beside ZeRO: its own automatic tensor parallelism of Hugging Face layers (AutoTP: tp with
implementation=huggingface), ZeRO over megatron-core's tensor parallelism (tp with implementation=local),
and sequences over ranks that exchange them for heads (Ulysses: cp with cp_comm_type=a2a).
"""

from __future__ import annotations

from kit.cost.offload import HOST_SHARE, host_ram_gib_per_node, nvme_gib_per_node
from kit.planner.rules.megatron import (
    megatron_family,
    megatron_rope,
    sequence_parallel,
    tp_divides_heads,
    tp_divides_mlp,
    tp_fits_kv_heads,
)
from kit.planner.rules.rule import Check, Rule, divisors, words
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import EngineName, Layout
from kit.specs.model import ModelSpec

MEGATRON_LAYERS = ("local",)
"""Implementations whose layers are megatron-core's, over which ZeRO can run."""

AUTOTP_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Of the families here, those whose plan in transformers AutoTP takes: module_inject/tp_plan_converter.py refuses the
fused projections of Phi-3 and of experts, module_inject/auto_tp.py GPT-2's transposed ones."""

# ---------------------------------------------------------------- precision and compression


def fp16_needs_cuda(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """engine.py, _do_sanity_check: fp16 is refused where the accelerator lacks it, and CPU processes do."""
    if job.precision == "fp16" and cluster.gpu.device == "cpu":
        return f"precision=fp16 on {cluster.gpu.name}: DeepSpeed refuses it on CPU processes; use bf16 or fp32"
    return None


def fp16_needs_zero(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """engine.py, backward, scales the loss for ZeRO's optimizers only; fp16/unfused_optimizer.py and its fused sibling
    divide by the scale all the same. Adam hides it, clipping and small gradients do not."""
    if job.precision == "fp16" and layout.zero_stage == 0:
        return (
            "precision=fp16 with zero_stage=0: DeepSpeed then divides gradients by a loss scale that it never "
            "multiplied them with; use zero_stage=1, 2 or 3"
        )
    return None


def autocast_is_deepspeeds(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """torch_autocast casts for an operator; with other engines or precisions there is no such choice, and its bf16
    gradients cannot be summed in a quantised gather (torch_autocast.py, _validate_auto_cast_settings)."""
    if not layout.autocast:
        return None
    if layout.engine != "deepspeed":
        usual = "always autocasts in bf16 DDP" if layout.engine == "torch" else "casts its weights"
        return f"autocast=true on engine={layout.engine}, which {usual}; leave it out, or use engine=deepspeed"
    if job.precision != "bf16":
        return f"autocast=true with precision={job.precision}: it computes in bf16; use precision=bf16"
    if layout.zero_quantized_weights:
        return "autocast=true with zero_quantized_weights=true, which DeepSpeed refuses together; use one of them"
    if layout.zero_stage == 0 or layout.implementation in MEGATRON_LAYERS:
        return (
            f"autocast=true with zero_stage={layout.zero_stage} and implementation={layout.implementation}: it is for "
            "ZeRO on Hugging Face layers; use zero_stage=1, 2 or 3 with huggingface, or engine=torch"
        )
    return None


def compression_has_a_hook(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Hooks belong to DDP (torch/distributed/algorithms/ddp_comm_hooks), communication_data_type to DeepSpeed's
    reductions; FSDP2 and Megatron have neither here."""
    kind = layout.gradient_compression
    if kind == "none":
        return None
    if layout.engine == "torch" and layout.zero_stage == 0:
        if layout.dp > 1:
            return None
        return f"gradient_compression={kind} with dp=1: nothing is sent; leave it out"
    if layout.engine == "deepspeed" and kind == "bf16":
        if job.precision == "fp32":
            return None
        return (
            f"gradient_compression=bf16 with precision={job.precision} on engine=deepspeed, whose gradients travel in "
            "16 bits as they are; leave it out"
        )
    return (
        f"gradient_compression={kind} on engine={layout.engine} with zero_stage={layout.zero_stage}; use engine=torch "
        "with zero_stage=0 (DDP), or ZeRO++ of engine=deepspeed (zero_quantized_gradients)"
    )


def zeropp(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """ZeRO++ compresses what stage 3 sends: other stages read none of its keys, and say nothing (engine.py,
    _configure_zero_optimizer). Its kernels are CUDA's (op_builder/quantizer.py) and compute in fp16."""
    quantized = [key for key in ("zero_quantized_weights", "zero_quantized_gradients") if getattr(layout, key)]
    given = [f"{key}=true" for key in quantized] + ([f"zero_hpz={layout.zero_hpz}"] if layout.zero_hpz > 1 else [])
    if not given:
        return None
    named = ", ".join(given)
    if layout.engine != "deepspeed" or layout.zero_stage != 3:
        return f"{named} on engine={layout.engine} with zero_stage={layout.zero_stage}: it is part of DeepSpeed's " + (
            "stage 3; use engine=deepspeed with zero_stage=3"
        )
    if quantized and cluster.gpu.device == "cpu":
        return f"{quantized[0]}=true on {cluster.gpu.name}: its kernels are for CUDA; leave it out"
    if quantized and job.precision == "fp32":
        return f"{quantized[0]}=true with precision=fp32: its kernels compute in 16 bits; use bf16 or fp16"
    if layout.cp > 1 or layout.tp > 1:
        return f"{named} with tp={layout.tp}, cp={layout.cp}: its groups are made of all ranks; use tp=1 and cp=1"
    return None


def hpz_divides_ranks(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """utils/groups.py, _create_zero_param_parallel_group: neighbouring ranks, and an assertion that they divide. A
    second copy pays where its ranks share a node."""
    if layout.zero_hpz == 1 or layout.zero_stage != 3 or layout.engine != "deepspeed":
        return None
    if cluster.gpus_per_node % layout.zero_hpz or layout.dp % layout.zero_hpz:
        fitting = [d for d in divisors(cluster.gpus_per_node) if layout.dp % d == 0]
        return (
            f"zero_hpz={layout.zero_hpz} does not divide the {cluster.gpus_per_node} GPUs of a node and "
            f"dp={layout.dp}; use {words(fitting)}"
        )
    if layout.offload_param != "none":
        return (
            f"zero_hpz={layout.zero_hpz} with offload_param={layout.offload_param}: the second copy would be offloaded "
            "too (partition_parameters.py, remote_device); use one of them"
        )
    return None


def quantized_gradients_need_nodes(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """stage3.py, __avg_scatter_grads: with one node they are reduced as ever, without a word; utils/groups.py makes the
    groups of whole nodes."""
    if layout.zero_quantized_gradients and layout.engine == "deepspeed" and cluster.num_nodes == 1:
        return "zero_quantized_gradients=true on one node, where DeepSpeed ignores it; leave it out"
    return None


# ---------------------------------------------------------------- ways to split


def deepspeed_splits(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """runtime/pipe/module.py takes a list of layers, which transformers' models are not, and pipe/engine.py asserts
    ``zero_optimization_stage() < ZeroStageEnum.gradients``; AutoEP fails on transformers 5 (docs/deepspeed.md)."""
    if layout.pp > 1:
        why = (
            f"zero_stage={layout.zero_stage} excludes pipeline parallelism"
            if layout.zero_stage >= 2
            else "its PipelineModule takes no Hugging Face model"
        )
        return f"pp={layout.pp} on engine=deepspeed: {why}; use pp=1, or engine=megatron with zero_stage 0 or 1"
    split = [f"{name}={getattr(layout, name)}" for name in ("vp", "ep", "etp") if getattr(layout, name) > 1]
    split += [
        f"{name}={size}" for name in ("first_stage_layers", "last_stage_layers") if (size := getattr(layout, name))
    ]
    if layout.sp and layout.implementation not in MEGATRON_LAYERS:
        split.append("sp=true")
    if split:
        return f"{', '.join(split)} on engine=deepspeed, which has tp and cp; use engine=megatron, or leave them out"
    return None


def deepspeed_tensor_parallel(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Heads and widths must divide, of AutoTP's layers as of Megatron's. AutoTP itself gives ranks beyond the key/value
    heads no attention at all (engine.py, _apply_autotp_partitioning warns), so here it needs whole ones."""
    over_megatron = layout.implementation in MEGATRON_LAYERS
    if layout.tp == 1:
        if over_megatron:
            return (
                f"implementation={layout.implementation} on engine=deepspeed with tp=1: Megatron's layers are there "
                "for their tensor parallelism; use tp>1, or huggingface"
            )
        return None
    if layout.cp > 1:
        return (
            f"tp={layout.tp} with cp={layout.cp} on engine=deepspeed, which has one or the other; use engine=megatron"
        )
    if not over_megatron and layout.tp > 1 and model.num_key_value_heads % layout.tp:
        return (
            f"tp={layout.tp} does not divide num_key_value_heads={model.num_key_value_heads} of {model.name}; "
            f"use {words(divisors(model.num_key_value_heads))}"
        )
    if model.num_experts:
        return f"tp={layout.tp} with the experts of {model.name} on engine=deepspeed; use engine=megatron, or tp=1"
    if not over_megatron and model.family not in AUTOTP_FAMILIES:
        return (
            f"tp={layout.tp} on engine=deepspeed with {model.name}, whose layers AutoTP cannot cut: it knows "
            f"{', '.join(AUTOTP_FAMILIES)}; use engine=megatron, or implementation=local"
        )
    if "nvme" in (layout.offload_optimizer, layout.offload_param):
        return (
            f"tp={layout.tp} with offload_optimizer={layout.offload_optimizer}, offload_param={layout.offload_param} "
            "on engine=deepspeed; use tp=1, or offload to cpu"
        )
    rules: tuple[Check, ...] = (tp_divides_heads, tp_fits_kv_heads, tp_divides_mlp, sequence_parallel)
    if over_megatron:
        rules = (megatron_family, megatron_rope, *rules)
    messages = (rule(model, cluster, job, layout) for rule in rules)
    return next((message for message in messages if message is not None), None)


def ulysses(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """runtime/sequence_parallel/ulysses_sp.py: ranks exchange their part of the sequence for a part of the heads;
    UlyssesSPAttentionHF's constructor names what must divide."""
    cp, kv_heads = layout.cp, model.num_key_value_heads
    if cp == 1:
        return None
    if layout.cp_comm_type != "a2a":
        return f"cp={cp} with cp_comm_type={layout.cp_comm_type} on engine=deepspeed, which has Ulysses; use a2a"
    if model.num_attention_heads % cp:
        return (
            f"cp={cp} does not divide num_attention_heads={model.num_attention_heads} of {model.name}; "
            f"use {words(divisors(model.num_attention_heads))}"
        )
    if kv_heads % cp and cp % kv_heads:
        fitting = [d for d in divisors(model.num_attention_heads) if kv_heads % d == 0 or d % kv_heads == 0]
        return (
            f"cp={cp} is neither a divisor nor a multiple of num_key_value_heads={kv_heads} of {model.name}; "
            f"use {words(fitting)}"
        )
    if job.seq_length % cp:
        return f"cp={cp} does not divide seq_length={job.seq_length}; use {words(divisors(cp))}, or another length"
    if model.windowed(job.seq_length):
        return (
            f"cp={cp} on engine=deepspeed with the sliding window of {model.name} (sliding_window="
            f"{model.sliding_window}): Ulysses drops attention masks without a word; use cp=1, or engine=megatron"
        )
    if model.family == "gpt2":
        return f"cp={cp} on engine=deepspeed with {model.name}: Ulysses reads num_key_value_heads, which GPT-2's " + (
            "configuration has not; use cp=1, or engine=megatron"
        )
    return None


# ---------------------------------------------------------------- offload


def offload_needs_zero(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """DeepSpeed reads offload_optimizer in its ZeRO optimizers only, offload_param in stage 3 only (stage3.py,
    _configure_offloading); elsewhere it would be ignored without a word."""
    param, optimizer, stage = layout.offload_param, layout.offload_optimizer, layout.zero_stage
    if param != "none" and stage != 3:
        return f"offload_param={param} with zero_stage={stage}: only stage 3 partitions parameters; use 3"
    if optimizer == "cpu" and stage == 0:
        return "offload_optimizer=cpu with zero_stage=0: only the ZeRO optimizers offload; use zero_stage=1, 2 or 3"
    if optimizer == "nvme" and stage != 3:
        # Stages 1 and 2 take nvme for cpu (engine.py, zero_cpu_offload).
        return (
            f"offload_optimizer=nvme with zero_stage={stage}, which keeps it in host memory: only stage 3 swaps; "
            "use zero_stage=3, or offload_optimizer=cpu"
        )
    return None


def host_ram(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """What is offloaded must go somewhere known."""
    needed = host_ram_gib_per_node(model, cluster, layout, job.precision)
    if not needed:
        return None
    if cluster.host_ram_gib is None:
        return (
            f"offload to the host of {cluster.name}, whose memory is unknown; needs {needed:.0f} GiB a node: "
            "give cluster.host_ram_gib"
        )
    usable = HOST_SHARE * cluster.host_ram_gib
    if needed > usable:
        return (
            f"offload needs {needed:.0f} GiB of host memory a node, and of the {cluster.host_ram_gib:.0f} GiB of "
            f"{cluster.name} {usable:.0f} are usable; offload to nvme, or use more nodes"
        )
    return None


def nvme(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Disks must be known and large enough; where they are mounted is the run's to say (run.nvme_path)."""
    needed = nvme_gib_per_node(model, cluster, layout, job.precision)
    if not needed:
        return None
    if cluster.nvme_gib is None:
        return (
            f"offload to NVMe of {cluster.name}, whose disks are unknown; needs {needed:.1f} GiB a node: "
            "give cluster.nvme_gib"
        )
    if needed > cluster.nvme_gib:
        return (
            f"offload needs {needed:.1f} GiB of NVMe a node, and {cluster.name} has {cluster.nvme_gib:.1f}; "
            "use more nodes, or offload to cpu"
        )
    return None


_DEEPSPEED: tuple[EngineName, ...] = ("deepspeed",)

DEEPSPEED_RULES: tuple[Rule, ...] = (
    Rule(fp16_needs_cuda, _DEEPSPEED),
    Rule(fp16_needs_zero, _DEEPSPEED),
    Rule(autocast_is_deepspeeds),
    Rule(compression_has_a_hook),
    Rule(zeropp),
    Rule(hpz_divides_ranks, _DEEPSPEED),
    Rule(quantized_gradients_need_nodes, _DEEPSPEED),
    Rule(deepspeed_splits, _DEEPSPEED),
    Rule(deepspeed_tensor_parallel, _DEEPSPEED),
    Rule(ulysses, _DEEPSPEED),
    Rule(offload_needs_zero, _DEEPSPEED),
    Rule(host_ram, _DEEPSPEED),
    Rule(nvme, _DEEPSPEED),
)
"""In the order of their messages. Those without an engine say who has what they are about."""
