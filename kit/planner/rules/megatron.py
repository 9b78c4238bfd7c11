"""Rules of Megatron-core: how tensors, layers, sequences and experts may be divided."""

from __future__ import annotations

from kit.cost.pipeline import middle_stage_layers
from kit.planner.rules.rule import Rule, divisors, words
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import Family, ModelSpec

MEGATRON_FAMILIES: tuple[Family, ...] = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "deepseek_v3",
    "gpt_oss",
)
"""Families with a weight map (kit/engines/megatron/weights/families.py)."""


def megatron_family(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Layers and weight maps that the engine has."""
    if model.family in MEGATRON_FAMILIES:
        return None
    return (
        f"family={model.family} of {model.name} on engine=megatron, which has {', '.join(MEGATRON_FAMILIES)}; "
        "use engine=deepspeed or torch"
    )


def megatron_rope(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """kit/engines/megatron/model/rope.py: kinds that frequencies alone express."""
    scaling = model.rope_scaling or {}
    kind = scaling.get("rope_type", "default")
    if kind == "yarn" and model.latent and scaling.get("mscale", 1) == scaling.get("mscale_all_dim", 0):
        return None  # the factor of queries and keys is then 1, and that of scores is the layer's
    if kind in ("yarn", "longrope") and not model.latent and model.partial_rotary_factor == 1:
        return None  # the factor of queries and keys is one of the scores
    if kind not in ("default", "linear", "llama3"):
        return (
            f"rope_type={kind} of {model.name} on engine=megatron, which computes default, linear, llama3 and, of "
            "whole heads, yarn and longrope; use engine=deepspeed or torch"
        )
    return None


def megatron_zero(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """The distributed optimizer shards optimizer state: stage 1. Stages 2 and 3 shard what its gradient buffers and
    pipeline stages need whole."""
    if layout.zero_stage > 1:
        return (
            f"zero_stage={layout.zero_stage} on engine=megatron, whose distributed optimizer is stage 1; "
            "use 1, or engine=deepspeed"
        )
    return None


def fp8(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Transformer Engine computes products in fp8, on tensor cores that have it: Ada, Hopper and newer."""
    if job.precision != "fp8":
        return None
    if layout.implementation != "transformer_engine":
        return (
            f"precision=fp8 with implementation={layout.implementation}, which has no fp8; "
            "use implementation=transformer_engine, or bf16"
        )
    if not cluster.gpu.fp8_tflops:
        return f"precision=fp8 on {cluster.gpu.name}, which has no fp8; use bf16, or a GPU of 2022 or newer (L4, H100)"
    return None


def tp_divides_heads(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """transformer_config.py: num_attention_heads must be a multiple of tensor_model_parallel_size."""
    if model.num_attention_heads % layout.tp:
        return (
            f"tp={layout.tp} does not divide num_attention_heads={model.num_attention_heads} of {model.name}; "
            f"use {words(divisors(model.num_attention_heads))}"
        )
    return None


def tp_fits_kv_heads(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """transformer_config.py: num_query_groups must be a multiple or a divisor of tensor_model_parallel_size. Fewer
    heads than ranks are shared (attention.py gathers them)."""
    heads = model.num_key_value_heads
    if heads % layout.tp and layout.tp % heads:
        fitting = [d for d in divisors(model.num_attention_heads) if heads % d == 0 or d % heads == 0]
        return (
            f"tp={layout.tp} is neither a divisor nor a multiple of num_key_value_heads={heads} of {model.name}; "
            f"use {words(fitting)}"
        )
    return None


def tp_divides_mlp(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """tensor_parallel/layers.py: ColumnParallelLinear divides its output size."""
    dense = not model.num_experts or model.first_dense_layers > 0
    if dense and model.ffn_hidden_size % layout.tp:
        fitting = [d for d in divisors(model.num_attention_heads) if model.ffn_hidden_size % d == 0]
        return (
            f"tp={layout.tp} does not divide ffn_hidden_size={model.ffn_hidden_size} of {model.name}; "
            f"use {words(fitting)}"
        )
    return None


def pipeline_divides_layers(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """transformer_block.py, get_num_layers_to_build: equal stages, unless a custom layout is given, which we give for
    ends with fewer or more layers."""
    chunks = layout.pp * layout.vp
    if layout.first_stage_layers or layout.last_stage_layers:
        return _uneven_stages(model, layout)
    if model.num_layers % chunks:
        given = f"pp={layout.pp}" if layout.vp == 1 else f"pp·vp={layout.pp}·{layout.vp}"
        near = [d for d in divisors(model.num_layers) if d <= 4 * chunks]
        return f"{given} does not divide num_layers={model.num_layers} of {model.name}; use {words(near)}"
    return None


def _uneven_stages(model: ModelSpec, layout: Layout) -> str | None:
    ends = {key: getattr(layout, key) for key in ("first_stage_layers", "last_stage_layers") if getattr(layout, key)}
    given = ", ".join(f"{key}={value}" for key, value in ends.items())
    if layout.pp == 1:
        return f"{given} with pp=1: there is one stage, which has all layers; use pp>1, or leave it out"
    if min(ends.values()) < layout.vp - 1:
        # Only the chunk with the embedding or the loss may do without a layer.
        return f"{given} with vp={layout.vp}: a stage has {layout.vp} chunks; use at least {layout.vp - 1} layers"
    layers, stages = middle_stage_layers(model, layout)
    if not stages:
        wrong = f"{given} are not num_layers={model.num_layers} of {model.name}; use two that add up to it"
        return wrong if layers else None
    parts = stages * layout.vp
    if layers > 0 and layers % parts == 0:
        return None
    each = f"{stages} other stages" + (f" of {layout.vp} chunks each" if layout.vp > 1 else "")
    return f"{given} leave {layers} layers of {model.name} for {each}; leave a multiple of {parts}"


def virtual_stages(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """parallel_state.py: interleaving needs a pipeline; schedules.py: micro batches come in groups of pp."""
    if layout.vp == 1:
        return None
    if layout.pp == 1:
        return f"vp={layout.vp} with pp=1: virtual stages interleave pipeline stages; use pp>1, or vp=1"
    m = layout.gradient_accumulation_steps
    if m % layout.pp:
        return (
            f"vp={layout.vp} with {m} micro batches a step: the interleaved schedule takes them in groups of "
            f"pp={layout.pp}; use a global_batch_size that is a multiple of "
            f"{layout.pp * layout.micro_batch_size * layout.dp}, or vp=1"
        )
    return None


def sequence_parallel(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """model_parallel_config.py refuses it without tensor parallelism; the sequence is cut into tp equal parts."""
    if not layout.sp:
        return None
    if layout.tp == 1:
        return "sp=true with tp=1: sequence parallelism splits over the tensor-parallel ranks; use tp>1, or sp=false"
    if job.seq_length % (layout.tp * layout.cp):
        return (
            f"sp=true with seq_length={job.seq_length}, which tp·cp={layout.tp * layout.cp} does not divide; "
            f"use a multiple of {layout.tp * layout.cp}, or sp=false"
        )
    return None


def context_parallel(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """The zig-zag order gives each rank two of 2·cp chunks, so that all compute the same share of the causal mask."""
    if layout.cp > 1 and job.seq_length % (2 * layout.cp):
        return (
            f"cp={layout.cp} with seq_length={job.seq_length}: 2·cp={2 * layout.cp} equal chunks are needed; "
            f"use a multiple of {2 * layout.cp}"
        )
    return None


def ring(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """kit/engines/megatron/model/cp_ring.py: whole causal attention by torch's flash kernels, which on CUDA are for
    16 bits."""
    if layout.cp == 1 or layout.cp_comm_type != "p2p":
        return None
    if model.latent:
        return f"cp_comm_type=p2p with the latent attention of {model.name}, whose values are narrower; use all_gather"
    if not model.traits.fused_attention or model.attention_softcap is not None:
        return f"cp_comm_type=p2p with {model.name}, whose scores no flash kernel computes; use all_gather"
    if model.windowed(job.seq_length):
        return (
            f"cp_comm_type=p2p with sliding_window={model.sliding_window} of {model.name}: the ring computes whole "
            "attention; use all_gather"
        )
    if job.precision == "fp32" and cluster.gpu.device == "cuda":
        return "cp_comm_type=p2p with precision=fp32, for which CUDA has no flash kernel; use all_gather, or bf16"
    return None


def expert_parallel(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """moe_layer.py: experts are dealt out evenly; parallel_state.py: their ranks are those of a pipeline stage."""
    ep, etp, experts = layout.ep, layout.etp, model.num_experts
    if not experts:
        return f"ep={ep}, etp={etp} with {model.name}, which has no experts; leave them out" if ep * etp > 1 else None
    if model.linear_bias and etp > 1:
        return f"etp={etp} with {model.name}: megatron-core does not cut experts that have biases; use etp=1 with ep>1"
    if experts % ep:
        return f"ep={ep} does not divide num_experts={experts} of {model.name}; use {words(divisors(experts))}"
    if model.moe_ffn_hidden_size % etp:
        return (
            f"etp={etp} does not divide moe_ffn_hidden_size={model.moe_ffn_hidden_size} of {model.name}; "
            f"use {words([d for d in divisors(layout.tp) if model.moe_ffn_hidden_size % d == 0])}"
        )
    ranks = layout.dp * layout.cp * layout.tp
    if ranks % (ep * etp):
        return (
            f"ep·etp={ep}·{etp} does not divide the dp·cp·tp={ranks} ranks of a pipeline stage; "
            f"use sizes whose product is {words(divisors(ranks))}"
        )
    return None


def expert_router(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """moe_utils.py, topk_routing_with_score_function: sigmoid scores of several experts are always made to add up to 1,
    and groups are chosen by their best topk/group_topk experts, where DeepSeek takes two."""
    if model.traits.router != "sigmoid" or not model.num_experts:
        return None
    if not model.norm_topk_prob or model.experts_per_token == 1:
        return (
            f"norm_topk_prob={model.norm_topk_prob}, experts_per_token={model.experts_per_token} of {model.name} on "
            "engine=megatron, whose weights of two experts or more add up to 1; use engine=deepspeed or torch"
        )
    if model.router_groups > 1 and model.experts_per_token != 2 * model.router_top_groups:
        return (
            f"router_top_groups={model.router_top_groups} with experts_per_token={model.experts_per_token} of "
            f"{model.name} on engine=megatron, which has two experts for each group; use engine=deepspeed or torch"
        )
    return None


def expert_tensor_parallel(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Without expert parallelism megatron-core reduces gradients of experts with all others
    (tensor_parallel/layers.py, ``allreduce``), so they must be cut alike: otherwise ranks drift apart silently."""
    if model.num_experts and layout.ep == 1 and layout.etp != layout.tp:
        return (
            f"etp={layout.etp} with ep=1 and tp={layout.tp}: experts are then cut as the rest is; use etp={layout.tp}"
        )
    return None


def experts_need_sequence_parallel(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """moe_layer.py, MoELayer.forward: training experts with tensor but without sequence parallelism is refused."""
    if model.num_experts and layout.tp > 1 and not layout.sp:
        return f"tp={layout.tp} with sp=false and the experts of {model.name}; use sp=true, or tp=1"
    return None


MEGATRON_RULES: tuple[Rule, ...] = tuple(
    Rule(check, ("megatron",))
    for check in (
        megatron_family,
        megatron_rope,
        megatron_zero,
        fp8,
        tp_divides_heads,
        tp_fits_kv_heads,
        tp_divides_mlp,
        pipeline_divides_layers,
        virtual_stages,
        sequence_parallel,
        context_parallel,
        ring,
        expert_parallel,
        expert_router,
        expert_tensor_parallel,
        experts_need_sequence_parallel,
    )
)
"""In the order of their messages."""
