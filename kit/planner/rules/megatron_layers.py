"""Rules of the layers that megatron-core computes, on its own engine or under DeepSpeed's ZeRO; AutoTP shares some."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from kit.cost.workload import Workload
from kit.planner.rules.common import runs_megatron_layers
from kit.planner.rules.rule import rule
from kit.specs.families import families_where
from kit.specs.layout import divisors
from kit.specs.model import ModelSpec
from kit.specs.text import first, listed, one_of

_DELTA_NET = "no gated delta net without the CUDA kernels of flash-linear-attention (ssm/gated_delta_net.py)"
NOT_IN_MEGATRON: Mapping[str, str] = {
    "qwen3_next": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": _DELTA_NET,
    "kimi_linear": "no Kimi delta attention",
    "llama4_text": "no attention in chunks (transformer/dot_product_attention.py)",
    "deepseek_v32": "no indexer without fast_hadamard_transform's CUDA kernels (experimental_attention_variant/dsa.py)",
}
"""Model type → the layer that megatron-core 0.16.1 lacks, read in its source."""
_IN_MEGATRON_BRIDGE = ("deepseek_v2", "gemma", "nemotron", "nemotron_h", "olmoe", "qwen3_next")
"""Model types without a weight map in kit that Megatron-Bridge 0.3.1 has (megatron/bridge/models, register_bridge). It
builds the model too, from Transformer Engine's layers, so kit cannot take its mappings alone. mbridge 0.15.1 has no
text model that kit lacks, except MiMo, whose code is not in transformers."""


@rule(
    "deepspeed",
    "megatron",
    message=lambda w: (
        f"family={w.model.model_type} of {w.model.name} with implementation={w.layout.implementation}, which has "
        f"{listed(families_where('megatron'))}"
        + (f", and {lacks}" if (lacks := NOT_IN_MEGATRON.get(w.model.model_type)) else "")
        + "; use implementation=huggingface on engine=deepspeed or torch"
        + (
            ", or Megatron-Bridge without kit, which converts and trains this family"
            if w.model.model_type in _IN_MEGATRON_BRIDGE
            else ""
        )
    ),
)
def megatron_family(w: Workload) -> bool:
    """The Megatron engine has layers and weight maps for some model families only."""
    return runs_megatron_layers(w.layout) and not w.model.traits.megatron


@rule("deepspeed", "megatron")
def megatron_rope(w: Workload) -> str | None:
    """kit/engines/megatron/model/rope.py supports kinds of RoPE scaling that change only the frequencies."""
    model, scaling = w.model, w.model.rope_scaling or {}
    kind = scaling.get("rope_type", "default")
    # Queries and keys then have the factor 1, and the layer applies the factor of the scores.
    ones = kind == "yarn" and model.latent and scaling.get("mscale", 1) == scaling.get("mscale_all_dim", 0)
    # The factor of queries and keys can be applied to the scores.
    whole = kind in ("yarn", "longrope") and not model.latent and model.partial_rotary_factor == 1
    if not runs_megatron_layers(w.layout) or kind in ("default", "linear", "llama3") or ones or whole:
        return None
    return (
        f"rope_type={kind} of {model.name} with implementation={w.layout.implementation}, which computes default, "
        "linear, llama3 and, of whole heads, yarn and longrope; use implementation=huggingface on engine=deepspeed "
        "or torch"
    )


def _has_dense_mlp(model: ModelSpec) -> bool:
    return not model.num_experts or model.first_dense_layers > 0


def whole_tp(w: Workload, divides_kv_heads: bool = False) -> str:
    """Sizes of tensor parallelism that the GPUs and every width of the model allow, as text."""
    model = w.model
    return one_of(
        tp
        for tp in divisors(gcd(w.cluster.num_gpus, model.num_attention_heads))
        if (model.num_key_value_heads % tp == 0 or (tp % model.num_key_value_heads == 0 and not divides_kv_heads))
        and not (_has_dense_mlp(model) and model.ffn_hidden_size % tp)
    )


@rule(
    "deepspeed",
    "megatron",
    message=lambda w: (
        f"tp={w.layout.tp} does not divide num_attention_heads={w.model.num_attention_heads} of {w.model.name}; "
        f"use {whole_tp(w)}"
    ),
)
def tp_divides_heads(w: Workload) -> bool:
    """Megatron: transformer_config.py, num_attention_heads is a multiple of tensor_model_parallel_size. AutoTP splits
    whole heads too."""
    return w.model.num_attention_heads % w.layout.tp != 0


@rule(
    "deepspeed",
    "megatron",
    message=lambda w: (
        f"tp={w.layout.tp} is neither a divisor nor a multiple of num_key_value_heads={w.model.num_key_value_heads} of "
        f"{w.model.name}; use {whole_tp(w)}"
    ),
)
def tp_fits_kv_heads(w: Workload) -> bool:
    """transformer_config.py: num_query_groups is a multiple or a divisor of tensor_model_parallel_size. Fewer heads
    than ranks are shared (attention.py gathers them). AutoTP is stricter (``autotp_divides_kv_heads``)."""
    heads, tp = w.model.num_key_value_heads, w.layout.tp
    return runs_megatron_layers(w.layout) and heads % tp != 0 and tp % heads != 0


@rule(
    "deepspeed",
    "megatron",
    message=lambda w: (
        f"tp={w.layout.tp} does not divide ffn_hidden_size={w.model.ffn_hidden_size} of {w.model.name}; "
        f"use {whole_tp(w)}"
    ),
)
def tp_divides_mlp(w: Workload) -> bool:
    """tensor_parallel/layers.py: ColumnParallelLinear divides its output size."""
    return w.model.ffn_hidden_size % w.layout.tp != 0 and _has_dense_mlp(w.model)


@rule(
    "deepspeed",
    "megatron",
    message="sp=true with tp=1: sequence parallelism splits over the tensor-parallel ranks; use tp>1, or sp=false",
)
def sequence_parallel_needs_tp(w: Workload) -> bool:
    """model_parallel_config.py refuses sequence parallelism without tensor parallelism."""
    return w.layout.sp and runs_megatron_layers(w.layout) and w.layout.tp == 1


@rule(
    "deepspeed",
    "megatron",
    message=lambda w: (
        f"sp=true with seq_length={w.job.seq_length}, which tp·cp={w.layout.tp * w.layout.cp} does not divide; "
        f"use a multiple of {w.layout.tp * w.layout.cp}, or sp=false"
    ),
)
def sequence_parallel_divides(w: Workload) -> bool:
    """Sequence parallelism splits the rest of the sequence (after context parallelism) evenly over tp."""
    split = w.layout.sp and w.layout.tp > 1 and runs_megatron_layers(w.layout)
    return split and w.job.seq_length % (w.layout.tp * w.layout.cp) != 0


@rule(
    "megatron",
    message="gradient_dtype=bf16 with precision=fp32, whose gradients are in fp32; use bf16, or leave it out",
)
def short_gradients_of_bf16(w: Workload) -> bool:
    """distributed_data_parallel.py: gradients are summed in fp32, or in the dtype of the parameters."""
    return w.layout.gradient_dtype != "fp32" and w.job.precision == "fp32"


@rule("megatron")
def fp8_weights(w: Workload) -> str | None:
    """transformer_config.py, fp8_param, and arguments.py, fp8_param_gather: weights of fp8 GEMMs, which the distributed
    optimizer makes of its fp32 master weights."""
    layout, job = w.layout, w.job
    if not layout.fp8_param_gather:
        return None
    reasons = {
        f"precision={job.precision}; use fp8": job.precision != "fp8",
        f"zero_stage={layout.zero_stage}; use zero_stage=1": layout.zero_stage != 1,
    }
    return first(reasons, "fp8_param_gather=true with {}, or leave it out")


_LOCAL_MODULES = frozenset({"core_attn", "mlp", "moe"})


@rule("megatron")
def recompute_modules(w: Workload) -> str | None:
    """transformer_config.py, recompute_modules. kit's own layers compute norms, latent attention and experts without
    the checkpoints that Transformer Engine's have for them (kit/engines/megatron/model)."""
    layout, named = w.layout, frozenset(w.layout.recompute_modules)
    if not named:
        return None
    absent = {name for name in named & {"moe", "moe_act", "shared_experts"} if not w.model.num_experts}
    absent |= named & {"mla_up_proj"} if w.model.latent is None else set()
    foreign = named - _LOCAL_MODULES if layout.implementation == "local" else frozenset()
    reasons = {
        f"recompute={layout.recompute}; use selective": layout.recompute != "selective",
        f"{listed(sorted(absent))}, which {w.model.name} does not have; take it out": bool(absent),
        f"implementation=local, which recomputes {listed(sorted(_LOCAL_MODULES))} alone": bool(foreign),
    }
    return first(reasons, f"recompute_modules={', '.join(sorted(named))} with {{}}, or leave it out")


@rule("megatron")
def optimizer_on_the_host(w: Workload) -> str | None:
    """optimizer_config.py: optimizer_cpu_offload reuses the precision-aware optimizer, which is a distributed one. In
    fp32, HybridDeviceOptimizer gives what stays on the GPU no gradients (_set_sub_optimizer_grads)."""
    layout, place = w.layout, w.layout.offload_optimizer
    if place == "none" and layout.optimizer_offload_fraction < 1:
        share = f"optimizer_offload_fraction={layout.optimizer_offload_fraction:g}"
        return f"{share} with offload_optimizer=none; use offload_optimizer=cpu, or leave it out"
    if place == "none":
        return None
    reasons = {
        "disks, which it does not use; use cpu": place == "nvme",
        f"zero_stage={layout.zero_stage}; use zero_stage=1": layout.zero_stage != 1,
        f"precision={w.job.precision}; use bf16": w.job.precision != "bf16",
        "LoRA, whose optimizer is small": w.job.lora is not None,
    }
    return first(reasons, f"offload_optimizer={place} on engine=megatron with {{}}, or leave it out")
