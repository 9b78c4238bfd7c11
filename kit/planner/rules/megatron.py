"""Rules of Megatron-core: how layers, sequences and experts may be divided over ranks."""

from __future__ import annotations

from math import gcd

from kit.cost.model.pipeline import middle_stage_layers
from kit.cost.workload import Workload
from kit.planner.rules.rule import rule
from kit.specs.families import families_where
from kit.specs.layout import divisors
from kit.specs.model import ModelSpec
from kit.specs.text import listed, one_of

# ---------------------------------------------------------------- layers


@rule(
    "megatron",
    message=lambda w: (
        f"zero_stage={w.layout.zero_stage} on engine=megatron, whose distributed optimizer is stage 1; "
        "use 1, or engine=deepspeed"
    ),
)
def megatron_zero(w: Workload) -> bool:
    """Megatron's distributed optimizer shards only optimizer state (stage 1). Its gradient buffers and pipeline stages
    need unsharded gradients and weights."""
    return w.layout.zero_stage > 1


@rule(
    "megatron",
    message=lambda w: (
        f"implementation=transformer_engine with family {w.model.family} of {w.model.name}: its layers are for "
        f"{listed(families_where('transformer_engine'))}; use local"
    ),
)
def transformer_engine_family(w: Workload) -> bool:
    """megatron-core's own layer specs; other families differ inside a layer (kit/engines/megatron/model)."""
    return w.layout.implementation == "transformer_engine" and not w.model.traits.transformer_engine


@rule("megatron", message="implementation=transformer_engine on CPU processes: its kernels are for GPUs; use local")
def transformer_engine_needs_cuda(w: Workload) -> bool:
    """Transformer Engine has kernels for GPUs alone."""
    return w.layout.implementation == "transformer_engine" and w.cluster.gpu.device != "cuda"


@rule(
    "megatron",
    message=lambda w: (
        f"precision=fp8 with implementation={w.layout.implementation}, which has no fp8; "
        "use implementation=transformer_engine, or bf16"
    ),
)
def fp8_needs_transformer_engine(w: Workload) -> bool:
    """Transformer Engine computes GEMMs in fp8, Megatron's local layers do not."""
    return w.job.precision == "fp8" and w.layout.implementation != "transformer_engine"


# ---------------------------------------------------------------- pipeline


@rule("megatron")
def pipeline_divides_layers(w: Workload) -> str | None:
    """transformer_block.py, get_num_layers_to_build: all stages are equal, unless kit sets a custom layout for the
    first and last stage."""
    layout, layers = w.layout, w.model.num_layers
    chunks = layout.pp * layout.vp
    if _uneven(w) or layers % chunks == 0:
        return None
    given = f"pp={layout.pp}" if layout.vp == 1 else f"pp·vp={layout.pp}·{layout.vp}"
    # pp must divide the number of GPUs too; vp need not.
    near = [d for d in divisors(gcd(layers, w.cluster.num_gpus) if layout.vp == 1 else layers) if d <= 4 * chunks]
    return f"{given} does not divide num_layers={layers} of {w.model.name}; use {one_of(near)}"


def _uneven(w: Workload) -> str:
    """Layers of an uneven first and last stage, as text; empty if all stages are equal."""
    keys = ("first_stage_layers", "last_stage_layers")
    if w.layout.first_stage_layers is w.layout.last_stage_layers is None:
        return ""
    return ", ".join(f"{key}={value}" for key in keys if (value := getattr(w.layout, key)))


@rule(
    "megatron",
    message=lambda w: f"{_uneven(w)} with pp=1: there is one stage, which has all layers; use pp>1, or leave it out",
)
def uneven_stages_need_pipeline(w: Workload) -> bool:
    """One stage has all layers."""
    return w.layout.pp == 1 and _uneven(w) != ""


@rule(
    "megatron",
    message=lambda w: (
        f"{_uneven(w)} with vp={w.layout.vp}: a stage has {w.layout.vp} chunks; use at least {w.layout.vp - 1} layers"
    ),
)
def uneven_stages_fill_chunks(w: Workload) -> bool:
    """Only the chunk with the embedding or the loss may do without a layer."""
    layout = w.layout
    ends = [end for end in (layout.first_stage_layers, layout.last_stage_layers) if end]
    return bool(ends) and layout.pp > 1 and min(ends) < layout.vp - 1


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


@rule(
    "megatron",
    message=lambda w: f"vp={w.layout.vp} with pp=1: virtual stages interleave pipeline stages; use pp>1, or vp=1",
)
def virtual_stages_need_pipeline(w: Workload) -> bool:
    """parallel_state.py: interleaving needs a pipeline."""
    return w.layout.vp > 1 and w.layout.pp == 1


@rule(
    "megatron",
    message=lambda w: (
        f"vp={w.layout.vp} with {w.layout.gradient_accumulation_steps} micro batches a step: the interleaved schedule "
        f"takes them in groups of pp={w.layout.pp}; use a global_batch_size that is a multiple of "
        f"{w.layout.pp * w.layout.micro_batch_size * w.layout.dp}, or vp=1"
    ),
)
def virtual_stages_group_batches(w: Workload) -> bool:
    """schedules.py: the interleaved schedule takes micro batches in groups of pp."""
    return w.layout.vp > 1 and w.layout.gradient_accumulation_steps % w.layout.pp != 0


# ---------------------------------------------------------------- sequences


@rule(
    "megatron",
    message=lambda w: (
        f"tp={w.layout.tp} with num_key_value_heads={w.model.num_key_value_heads} of {w.model.name}, whose norm is of "
        f"all key heads together; use {one_of(divisors(w.model.num_key_value_heads))}"
    ),
)
def width_norm_splits_key_heads(w: Workload) -> bool:
    """kit/engines/megatron/model/norms.py, WidthRMSNorm, sums squares over ranks. A key head on two ranks would be
    counted twice."""
    return w.model.traits.qk_norm == "width" and w.model.num_key_value_heads % w.layout.tp != 0


@rule("megatron")
def queries_are_not_scaled_by_position(w: Workload) -> str | None:
    """modeling_ministral3.py, get_llama_4_attn_scale, is 1 only up to the original context length."""
    scaling = w.model.rope_scaling or {}
    original = scaling.get("original_max_position_embeddings")
    if scaling.get("llama_4_scaling_beta") and isinstance(original, int) and w.job.seq_length > original:
        return (
            f"seq_length={w.job.seq_length} of {w.model.name}, which scales queries from position {original} on "
            f"(llama_4_scaling_beta), as no layer of megatron-core does; use at most {original}, or layout.engine=torch"
        )
    return None


# ---------------------------------------------------------------- experts


@rule(
    "megatron",
    message=lambda w: (
        f"etp={w.layout.etp} with {w.model.name}: megatron-core does not split experts that have biases; use etp=1 "
        "with ep>1"
    ),
)
def etp_without_biases(w: Workload) -> bool:
    """moe/experts.py: biases of experts are not split."""
    return w.model.num_experts > 0 and w.model.linear_bias and w.layout.etp > 1


@rule(
    "megatron",
    message=lambda w: (
        f"etp={w.layout.etp} does not divide moe_ffn_hidden_size={w.model.moe_ffn_hidden_size} of {w.model.name}; "
        f"use {one_of(d for d in divisors(w.layout.tp) if w.model.moe_ffn_hidden_size % d == 0)}"
    ),
)
def etp_divides_experts(w: Workload) -> bool:
    """tensor_parallel/layers.py: etp divides the width of an expert's matrices."""
    return w.model.num_experts > 0 and w.model.moe_ffn_hidden_size % w.layout.etp != 0


def _sigmoid_router(model: ModelSpec) -> bool:
    return model.traits.router == "sigmoid" and model.num_experts > 0


@rule(
    "megatron",
    message=lambda w: (
        f"norm_topk_prob={w.model.norm_topk_prob}, experts_per_token={w.model.experts_per_token} of {w.model.name} on "
        "engine=megatron, which normalises the weights of two or more chosen experts to a sum of 1; use "
        "engine=deepspeed or torch"
    ),
)
def router_weights_add_up(w: Workload) -> bool:
    """moe_utils.py, topk_routing_with_score_function: sigmoid scores of several experts always add up to 1."""
    return _sigmoid_router(w.model) and (not w.model.norm_topk_prob or w.model.experts_per_token == 1)


@rule(
    "megatron",
    message=lambda w: (
        f"router_top_groups={w.model.router_top_groups} with experts_per_token={w.model.experts_per_token} of "
        f"{w.model.name} on engine=megatron, which ranks groups by their best two experts; use engine=deepspeed or "
        "torch"
    ),
)
def router_groups_of_two(w: Workload) -> bool:
    """moe_utils.py scores a group by its best topk/group_topk experts; DeepSeek always uses two."""
    model = w.model
    return _sigmoid_router(model) and model.router_groups > 1 and model.experts_per_token != 2 * model.router_top_groups


@rule(
    "megatron",
    message=lambda w: (
        f"etp={w.layout.etp} with ep=1 and tp={w.layout.tp}: without expert parallelism experts are split like all "
        f"other layers; use etp={w.layout.tp}"
    ),
)
def etp_follows_tp(w: Workload) -> bool:
    """Without expert parallelism megatron-core reduces expert gradients together with dense gradients
    (tensor_parallel/layers.py, ``allreduce``), so etp must equal tp. Otherwise the ranks' weights diverge silently."""
    return w.model.num_experts > 0 and w.layout.ep == 1 and w.layout.etp != w.layout.tp


@rule(
    "megatron",
    message=lambda w: f"tp={w.layout.tp} with sp=false and the experts of {w.model.name}; use sp=true, or tp=1",
)
def experts_need_sequence_parallel(w: Workload) -> bool:
    """moe_layer.py, MoELayer.forward: training experts with tensor but without sequence parallelism is refused."""
    return w.model.num_experts > 0 and w.layout.tp > 1 and not w.layout.sp
