"""Rules of Megatron-core: how layers, sequences and experts may be divided over ranks."""

from __future__ import annotations

from math import gcd

from kit.cost.model.pipeline import middle_stage_layers
from kit.cost.workload import Workload
from kit.planner.divisors import divisors, one_of
from kit.planner.rules.rule import rule
from kit.specs.families import families_where

# ---------------------------------------------------------------- layers


@rule("megatron")
def megatron_zero(w: Workload) -> str | None:
    """The distributed optimizer shards optimizer state: stage 1. Stages 2 and 3 shard what its gradient buffers and
    pipeline stages need whole."""
    if w.layout.zero_stage > 1:
        return (
            f"zero_stage={w.layout.zero_stage} on engine=megatron, whose distributed optimizer is stage 1; "
            "use 1, or engine=deepspeed"
        )
    return None


@rule("megatron")
def transformer_engine_family(w: Workload) -> str | None:
    """megatron-core's own layer specs; other families differ inside a layer (kit/engines/megatron/model)."""
    if w.layout.implementation == "transformer_engine" and not w.model.traits.transformer_engine:
        return (
            f"implementation=transformer_engine with family {w.model.family} of {w.model.name}: its layers are for "
            f"{', '.join(families_where('transformer_engine'))}; use local"
        )
    return None


@rule("megatron")
def transformer_engine_needs_cuda(w: Workload) -> str | None:
    """Transformer Engine has kernels for GPUs alone."""
    if w.layout.implementation == "transformer_engine" and w.cluster.gpu.device != "cuda":
        return "implementation=transformer_engine on CPU processes: its kernels are for GPUs; use local"
    return None


@rule("megatron")
def fp8_needs_transformer_engine(w: Workload) -> str | None:
    """Transformer Engine computes GEMMs in fp8, Megatron's local layers do not."""
    if w.job.precision == "fp8" and w.layout.implementation != "transformer_engine":
        return (
            f"precision=fp8 with implementation={w.layout.implementation}, which has no fp8; "
            "use implementation=transformer_engine, or bf16"
        )
    return None


# ---------------------------------------------------------------- pipeline


@rule("megatron")
def pipeline_divides_layers(w: Workload) -> str | None:
    """transformer_block.py, get_num_layers_to_build: equal stages, unless a custom layout is given, which kit gives
    for first and last stages with fewer or more layers."""
    layout, layers = w.layout, w.model.num_layers
    chunks = layout.pp * layout.vp
    if _uneven(w) or layers % chunks == 0:
        return None
    given = f"pp={layout.pp}" if layout.vp == 1 else f"pp·vp={layout.pp}·{layout.vp}"
    # Stages are of the GPUs too; chunks of a stage are not.
    near = [d for d in divisors(gcd(layers, w.cluster.num_gpus) if layout.vp == 1 else layers) if d <= 4 * chunks]
    return f"{given} does not divide num_layers={layers} of {w.model.name}; use {one_of(near)}"


def _uneven(w: Workload) -> str:
    """Layers of an uneven first and last stage, as text; empty where all stages are equal."""
    keys = ("first_stage_layers", "last_stage_layers")
    return ", ".join(f"{key}={value}" for key in keys if (value := getattr(w.layout, key)))


@rule("megatron")
def uneven_stages_need_pipeline(w: Workload) -> str | None:
    """One stage has all layers."""
    if w.layout.pp == 1 and (given := _uneven(w)):
        return f"{given} with pp=1: there is one stage, which has all layers; use pp>1, or leave it out"
    return None


@rule("megatron")
def uneven_stages_fill_chunks(w: Workload) -> str | None:
    """Only the chunk with the embedding or the loss may do without a layer."""
    layout = w.layout
    ends = [end for end in (layout.first_stage_layers, layout.last_stage_layers) if end]
    if ends and layout.pp > 1 and min(ends) < layout.vp - 1:
        return f"{_uneven(w)} with vp={layout.vp}: a stage has {layout.vp} chunks; use at least {layout.vp - 1} layers"
    return None


@rule("megatron")
def uneven_stages_add_up(w: Workload) -> str | None:
    """The stages between the first and the last share the other layers evenly, chunk by chunk."""
    model, layout = w.model, w.layout
    if layout.pp == 1 or not (given := _uneven(w)):
        return None
    layers, stages = middle_stage_layers(model, layout)
    if not stages:
        wrong = f"{given} are not num_layers={model.num_layers} of {model.name}; use two that add up to it"
        return wrong if layers else None
    parts = stages * layout.vp
    if layers > 0 and layers % parts == 0:
        return None
    each = f"{stages} other stages" + (f" of {layout.vp} chunks each" if layout.vp > 1 else "")
    return f"{given} leave {layers} layers of {model.name} for {each}; leave a multiple of {parts}"


@rule("megatron")
def virtual_stages_need_pipeline(w: Workload) -> str | None:
    """parallel_state.py: interleaving needs a pipeline."""
    if w.layout.vp > 1 and w.layout.pp == 1:
        return f"vp={w.layout.vp} with pp=1: virtual stages interleave pipeline stages; use pp>1, or vp=1"
    return None


@rule("megatron")
def virtual_stages_group_batches(w: Workload) -> str | None:
    """schedules.py: the interleaved schedule takes micro batches in groups of pp."""
    layout = w.layout
    if layout.vp > 1 and layout.gradient_accumulation_steps % layout.pp:
        return (
            f"vp={layout.vp} with {layout.gradient_accumulation_steps} micro batches a step: the interleaved schedule "
            f"takes them in groups of pp={layout.pp}; use a global_batch_size that is a multiple of "
            f"{layout.pp * layout.micro_batch_size * layout.dp}, or vp=1"
        )
    return None


# ---------------------------------------------------------------- sequences


@rule("megatron")
def context_parallel(w: Workload) -> str | None:
    """The zig-zag order gives each rank two of 2·cp chunks, so that all compute the same share of the causal mask."""
    cp = w.layout.cp
    if cp > 1 and w.job.seq_length % (2 * cp):
        return (
            f"cp={cp} with seq_length={w.job.seq_length}: 2·cp={2 * cp} equal chunks are needed; "
            f"use a multiple of {2 * cp}"
        )
    return None


def _ring(w: Workload) -> bool:
    """kit/engines/megatron/model/cp_ring.py: whole causal attention by torch's flash kernels."""
    return w.layout.cp > 1 and w.layout.cp_comm_type == "p2p"


@rule("megatron")
def ring_without_mla(w: Workload) -> str | None:
    """Latent attention's values are narrower than its queries and keys."""
    if _ring(w) and w.model.latent:
        return (
            f"cp_comm_type=p2p with the latent attention of {w.model.name}, whose values are narrower than its keys; "
            "use all_gather"
        )
    return None


@rule("megatron")
def ring_needs_fused_attention(w: Workload) -> str | None:
    """Softcaps and sinks change scores, which a flash kernel does not hand out."""
    if _ring(w) and (not w.model.traits.fused_attention or w.model.attention_softcap is not None):
        return f"cp_comm_type=p2p with {w.model.name}, for whose attention there is no flash kernel; use all_gather"
    return None


@rule("megatron")
def ring_without_window(w: Workload) -> str | None:
    """Ring attention passes all keys and values to every rank."""
    if _ring(w) and w.model.windowed(w.job.seq_length):
        return (
            f"cp_comm_type=p2p with sliding_window={w.model.sliding_window} of {w.model.name}: the ring computes whole "
            "attention; use all_gather"
        )
    return None


@rule("megatron")
def ring_needs_16_bits(w: Workload) -> str | None:
    """torch's flash kernels on CUDA are for fp16 and bf16."""
    if _ring(w) and w.job.precision == "fp32" and w.cluster.gpu.device == "cuda":
        return "cp_comm_type=p2p with precision=fp32, for which CUDA has no flash kernel; use all_gather, or bf16"
    return None


# ---------------------------------------------------------------- experts


@rule("megatron")
def experts_exist(w: Workload) -> str | None:
    """Expert parallelism is for models with experts."""
    ep, etp = w.layout.ep, w.layout.etp
    if ep * etp > 1 and not w.model.num_experts:
        return f"ep={ep}, etp={etp} with {w.model.name}, which has no experts; leave them out"
    return None


@rule("megatron")
def etp_without_biases(w: Workload) -> str | None:
    """moe/experts.py: biases of experts are not split."""
    if w.model.num_experts and w.model.linear_bias and w.layout.etp > 1:
        return (
            f"etp={w.layout.etp} with {w.model.name}: megatron-core does not split experts that have biases; use etp=1 "
            "with ep>1"
        )
    return None


@rule("megatron")
def ep_divides_experts(w: Workload) -> str | None:
    """moe_layer.py: every rank has the same number of experts."""
    ep, experts = w.layout.ep, w.model.num_experts
    if experts and experts % ep:
        fitting = divisors(gcd(experts, w.cluster.num_gpus))
        return f"ep={ep} does not divide num_experts={experts} of {w.model.name}; use {one_of(fitting)}"
    return None


@rule("megatron")
def etp_divides_experts(w: Workload) -> str | None:
    """tensor_parallel/layers.py, of an expert's matrices."""
    etp, width = w.layout.etp, w.model.moe_ffn_hidden_size
    if w.model.num_experts and width % etp:
        return (
            f"etp={etp} does not divide moe_ffn_hidden_size={width} of {w.model.name}; "
            f"use {one_of(d for d in divisors(w.layout.tp) if width % d == 0)}"
        )
    return None


@rule("megatron")
def ep_divides_ranks(w: Workload) -> str | None:
    """parallel_state.py: the ranks of the experts are those of a pipeline stage."""
    layout = w.layout
    ranks = layout.dp * layout.cp * layout.tp
    if w.model.num_experts and ranks % (layout.ep * layout.etp):
        return (
            f"ep·etp={layout.ep}·{layout.etp} does not divide the dp·cp·tp={ranks} ranks of a pipeline stage; "
            f"use sizes whose product is {one_of(divisors(ranks))}"
        )
    return None


@rule("megatron")
def router_weights_add_up(w: Workload) -> str | None:
    """moe_utils.py, topk_routing_with_score_function: sigmoid scores of several experts always add up to 1."""
    model = w.model
    if model.traits.router != "sigmoid" or not model.num_experts:
        return None
    if not model.norm_topk_prob or model.experts_per_token == 1:
        return (
            f"norm_topk_prob={model.norm_topk_prob}, experts_per_token={model.experts_per_token} of {model.name} on "
            "engine=megatron, which normalises the weights of two or more chosen experts to a sum of 1; use "
            "engine=deepspeed or torch"
        )
    return None


@rule("megatron")
def router_groups_of_two(w: Workload) -> str | None:
    """moe_utils.py: groups are chosen by their best topk/group_topk experts, where DeepSeek takes two."""
    model = w.model
    if model.traits.router != "sigmoid" or not model.num_experts or model.router_groups <= 1:
        return None
    if model.experts_per_token != 2 * model.router_top_groups:
        return (
            f"router_top_groups={model.router_top_groups} with experts_per_token={model.experts_per_token} of "
            f"{model.name} on engine=megatron, which ranks groups by their best two experts; use engine=deepspeed or "
            "torch"
        )
    return None


@rule("megatron")
def etp_follows_tp(w: Workload) -> str | None:
    """Without expert parallelism megatron-core reduces gradients of experts with all others
    (tensor_parallel/layers.py, ``allreduce``), so both must be split alike: otherwise ranks drift apart silently."""
    layout = w.layout
    if w.model.num_experts and layout.ep == 1 and layout.etp != layout.tp:
        return (
            f"etp={layout.etp} with ep=1 and tp={layout.tp}: without expert parallelism experts are split like all "
            f"other layers; use etp={layout.tp}"
        )
    return None


@rule("megatron")
def experts_need_sequence_parallel(w: Workload) -> str | None:
    """moe_layer.py, MoELayer.forward: training experts with tensor but without sequence parallelism is refused."""
    if w.model.num_experts and w.layout.tp > 1 and not w.layout.sp:
        return f"tp={w.layout.tp} with sp=false and the experts of {w.model.name}; use sp=true, or tp=1"
    return None
