"""Rules of several engines: sizes, precision, and which jobs and layers each engine supports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from operator import attrgetter
from typing import Any

from kit.cost.model.lora import named_layers
from kit.cost.workload import Workload
from kit.planner.divisors import divisors, one_of
from kit.planner.rules.rule import rule
from kit.specs.families import families_where
from kit.specs.layout import DEFAULTS, ENGINES, FLAGS, EngineName, Layout
from kit.specs.model import ModelSpec
from kit.specs.objectives import TRL

# ---------------------------------------------------------------- sizes


@rule()
def world_size(w: Workload) -> str | None:
    """A plan uses every GPU it was given."""
    layout, cluster = w.layout, w.cluster
    if layout.world_size == cluster.num_gpus:
        return None
    inner = layout.tp * layout.pp * layout.cp
    if cluster.num_gpus % inner:
        return (
            f"tp·pp·cp={inner} does not divide the {cluster.num_gpus} GPUs of {cluster.name}; "
            f"use sizes whose product is {one_of(divisors(cluster.num_gpus))}"
        )
    return (
        f"dp·cp·tp·pp={layout.world_size} is not the {cluster.num_gpus} GPUs of {cluster.name}; "
        f"use dp={cluster.num_gpus // inner}"
    )


@rule()
def batch(w: Workload) -> str | None:
    """global_batch_size = micro_batch_size · gradient_accumulation_steps · dp, on every data-parallel rank the same."""
    layout = w.layout
    wanted, unit = w.job.global_batch_size, layout.micro_batch_size * layout.dp
    if layout.global_batch_size == wanted:
        return None
    if wanted % unit == 0:
        return (
            f"micro_batch_size·gradient_accumulation_steps·dp={layout.global_batch_size} is not "
            f"global_batch_size={wanted}; use gradient_accumulation_steps={wanted // unit}"
        )
    below, above = wanted // unit * unit, (wanted // unit + 1) * unit
    return (
        f"micro_batch_size·dp={layout.micro_batch_size}·{layout.dp} does not divide global_batch_size={wanted}; "
        f"use global_batch_size={one_of(filter(None, (below, above)))}"
    )


@rule(
    says=lambda w: (
        f"seq_length={w.job.seq_length} is longer than the {w.model.max_position_embeddings} learned positions of "
        f"{w.model.name}; use at most {w.model.max_position_embeddings}"
    )
)
def positions(w: Workload) -> bool:
    """A learned position table has a fixed length. RoPE has none: longer sequences run, with a note in the plan."""
    return w.model.learned_positions and w.job.seq_length > w.model.max_position_embeddings


# ---------------------------------------------------------------- flags


@rule()
def flag_of_engine(w: Workload) -> str | None:
    """``Layout`` names the engines that read each flag. Other engines would ignore it silently, so kit refuses it."""
    engine = w.layout.engine
    names, values_of, defaults = _FOREIGN[engine]
    if values_of(w.layout) == defaults:
        return None
    given = [name for name in names if getattr(w.layout, name) != DEFAULTS[name]]
    able = [other for other in ENGINES if all(other in FLAGS[name].engines for name in given)]
    values = ", ".join(f"{name}={str(getattr(w.layout, name)).lower()}" for name in given)
    them = "them" if len(given) > 1 else "it"
    fix = f"use engine={one_of(able)}, or leave {them} out" if able else f"leave {them} out"
    return f"{values} on engine={engine}, which does not take {them}; {fix}"


def _foreign(engine: EngineName) -> tuple[list[str], Callable[[Layout], tuple[Any, ...]], tuple[Any, ...]]:
    """Flags that the engine does not read, a function that reads them all, and their defaults. A search asks this of
    every layout, and comparing two tuples is the fastest answer."""
    names = [name for name, flag in FLAGS.items() if engine not in flag.engines]
    if engine == "deepspeed":
        names.remove("pp")  # deepspeed_pipeline says why
    return names, attrgetter(*names), tuple(DEFAULTS[name] for name in names)


_FOREIGN = {engine: _foreign(engine) for engine in ENGINES}


@rule()
def multi_token_prediction(w: Workload) -> str | None:
    """megatron-core computes these heads (transformer/multi_token_prediction.py), no class of transformers does. It
    takes the label after next of a row, which in packed documents is another document's."""
    if not w.job.mtp_num_layers:
        return None
    said = f"mtp_num_layers={w.job.mtp_num_layers}"
    broken = {
        f"engine={w.layout.engine}, which has no such heads; use engine=megatron": w.layout.engine != "megatron",
        f"objective={w.job.objective}; use pretrain": w.job.objective != "pretrain",
        "LoRA, which trains no weights": w.job.lora is not None,
        f"the tied embeddings of {w.model.name}": w.model.tied_embeddings,
        "overlap_moe_expert_parallel_comm=true; use 1": (
            w.layout.overlap_moe_expert_parallel_comm and w.job.mtp_num_layers > 1
        ),
    }
    found = next((why for why, is_broken in broken.items() if is_broken), None)
    return found and f"{said} with {found}, or leave it out"


# ---------------------------------------------------------------- layers


def runs_megatron_layers(layout: Layout) -> bool:
    """Whether megatron-core's layers compute the model, on its own engine or under DeepSpeed's ZeRO."""
    return layout.implementation != "huggingface"


@rule(
    says=lambda w: (
        f"implementation={w.layout.implementation} cannot run on engine={w.layout.engine}; use "
        f"{_IMPLEMENTATIONS[w.layout.engine][0]}"
    )
)
def implementation(w: Workload) -> bool:
    """Megatron computes its own layers; torch and DeepSpeed those of transformers, DeepSpeed Megatron's too."""
    return w.layout.implementation not in _IMPLEMENTATIONS[w.layout.engine]


_IMPLEMENTATIONS: dict[EngineName, tuple[str, ...]] = {
    "torch": ("huggingface",),
    "deepspeed": ("huggingface", "local"),
    "megatron": ("local", "transformer_engine"),
}


@rule(
    says=lambda w: (
        f"objective={w.job.objective} with {w.model.name} of family {w.model.family}; use "
        f"{'seq2seq' if w.model.is_encoder_decoder else 'pretrain or sft, or an encoder-decoder'}"
    )
)
def objective_of_stacks(w: Workload) -> bool:
    """An encoder-decoder trains on pairs, and pairs need an encoder-decoder."""
    return w.model.is_encoder_decoder != (w.job.objective == "seq2seq")


@rule(says="recompute=selective is not supported; use none or full")
def recompute(w: Workload) -> bool:
    """Only megatron-core's layer can recompute attention alone (transformer/attention.py, core_attn)."""
    return w.layout.recompute == "selective" and w.layout.engine != "megatron"


# ---------------------------------------------------------------- jobs


@rule(
    says=lambda w: (
        f"precision=bf16 on {w.cluster.gpu.name}, which has no bf16; "
        "use precision=fp16 with engine=deepspeed, fp32, or a GPU from Ampere on"
    )
)
def bf16_units(w: Workload) -> bool:
    """Turing and older have no bf16 units; torch emulates it far slower than fp32."""
    return w.job.precision == "bf16" and w.cluster.gpu.bf16_tflops == 0


@rule(
    "torch",
    "megatron",
    says=lambda w: (
        f"precision=fp8 on {w.cluster.gpu.name}, which has no fp8; use bf16, or a GPU of 2022 or newer (L4, H100)"
    ),
)
def fp8_units(w: Workload) -> bool:
    """Tensor cores multiply fp8 from Ada and Hopper on (compute capability 8.9); CPU processes emulate it."""
    return w.job.precision == "fp8" and w.cluster.gpu.device == "cuda" and not w.cluster.gpu.fp8_tflops


def _precisions(layout: Layout) -> tuple[str, ...]:
    if layout.engine != "deepspeed":
        return ("bf16", "fp32", "fp8")
    return ("bf16", "fp32") if runs_megatron_layers(layout) else ("bf16", "fp32", "fp16")


@rule(says=lambda w: f"precision={w.job.precision} is not supported; use {one_of(_precisions(w.layout))}")
def precision(w: Workload) -> bool:
    """Only DeepSpeed with Hugging Face models supports fp16 (it scales the loss). The other engines support fp8."""
    return w.job.precision not in _precisions(w.layout)


def _whole_samples(layout: Layout) -> bool:
    """Whether ranks compute whole samples with a Hugging Face model, without splitting sequences or layers."""
    return layout.implementation == "huggingface" and layout.tp == layout.cp == 1


def _objectives(layout: Layout) -> tuple[str, ...]:
    if _whole_samples(layout):
        return ("pretrain", "sft", "seq2seq", *TRL)
    # Only kit's own attention (kit/engines/megatron/model/attention.py) knows the document of each position.
    own_attention = layout.engine == "megatron" and layout.implementation == "local"
    return ("pretrain", "sft") if own_attention else ("pretrain",)


@rule(
    says=lambda w: (
        f"objective={w.job.objective} is not supported on engine={w.layout.engine} with this layout; use "
        f"{one_of(_objectives(w.layout))}"
        + ("" if _whole_samples(w.layout) else ", or engine=torch or deepspeed with tp=1, cp=1")
    )
)
def objective(w: Workload) -> bool:
    """Samples of SFT and of pairs have different lengths, and pairs a source; not every split supports this."""
    return w.job.objective not in _objectives(w.layout)


_FUSED_ON_MEGATRON = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})


@rule()
def lora_layers(w: Workload) -> str | None:
    """Layers are listed by the names that kit knows of the model, so that their sizes are counted."""
    chosen = w.job.lora
    if chosen is None or not (chosen.target_modules or chosen.rank_pattern or chosen.alpha_pattern):
        return None
    known = named_layers(w.model)
    for key in ("target_modules", "rank_pattern", "alpha_pattern"):
        if unknown := [name for name in getattr(chosen, key) if name not in known]:
            fix = f"use {', '.join(known)}" if known else "leave it out, or use lora.targets"
            return f"lora.{key} has {unknown[0]}, which kit does not know of {w.model.name}; {fix}"
        if key != "target_modules" and (idle := [name for name in getattr(chosen, key) if name not in chosen.layers]):
            return f"lora.{key} has {idle[0]}, which gets no adapter; leave it out, or add it to lora.target_modules"
    if chosen.rank_pattern and w.model.num_shared_experts and "up_proj" in chosen.layers:
        return f"lora.rank_pattern with adapters on the shared experts of {w.model.name}; list lora.target_modules"
    if w.layout.engine != "megatron":
        return None
    for fused in _FUSED_ON_MEGATRON:
        if (listed := fused & set(chosen.target_modules)) and listed != fused:
            return (
                f"lora.target_modules has {', '.join(sorted(listed))} alone on engine=megatron, where "
                f"{', '.join(sorted(fused))} are one layer; list all of them, or use engine=torch"
            )
    if chosen.rank_pattern or chosen.alpha_pattern:
        return (
            "lora.rank_pattern or alpha_pattern on engine=megatron, whose fused layers have one rank; use engine=torch"
        )
    return None


@rule()
def dora(w: Workload) -> str | None:
    """peft's layer reads the frozen weight beside its adapter (peft/tuners/lora/dora.py, DoraLinearLayer). ZeRO-3 has
    not gathered the weight there, and tensor parallelism has a part of it. Not tested over 4 bits or with experts."""
    chosen, layout = w.job.lora, w.layout
    if chosen is None or not chosen.use_dora:
        return None
    broken = {
        f"implementation={layout.implementation}, whose layers have no DoRA; use engine=torch": (
            layout.implementation != "huggingface"
        ),
        "zero_stage=3 on engine=deepspeed, which has not gathered the weight when peft reads it; use at most 2, or "
        "engine=torch": layout.engine == "deepspeed" and layout.zero_stage == 3,
        f"tp={layout.tp}, where a rank has a part of the weight; use tp=1": layout.tp > 1,
        "four_bit=true, which was not tested; use false": chosen.four_bit,
        f"the experts of {w.model.name}; use false": w.model.num_experts > 0,
    }
    found = next((why for why, is_broken in broken.items() if is_broken), None)
    return found and f"lora.use_dora=true with {found}, or leave it out"


@rule()
def lora(w: Workload) -> str | None:
    """LoRA trains on Hugging Face layers and on Megatron's local layers. NVMe offload was not tested with frozen
    weights."""
    chosen, layout = w.job.lora, w.layout
    if chosen is None:
        return None
    if layout.implementation == "huggingface" and not layout.uses_nvme:
        if layout.tp > 1 and (chosen.four_bit or chosen.dropout):
            what = "four_bit=true" if chosen.four_bit else f"dropout={chosen.dropout:g}"
            return f"lora.{what} with tp={layout.tp} on Hugging Face layers was not tested; leave it out, or use tp=1"
        return None
    if layout.engine != "megatron" or layout.implementation != "local":
        return (
            "lora={…} is not supported; leave it out, or use engine=torch, or engine=megatron with implementation=local"
        )
    if chosen.four_bit:
        return "lora.four_bit=true on engine=megatron, whose layers have no 4-bit weights; use false, or engine=torch"
    if chosen.dropout:
        return f"lora.dropout={chosen.dropout:g} on engine=megatron, which has none; use 0, or engine=torch"
    if chosen.targets == "all-linear" and not chosen.target_modules and w.model.num_shared_experts:
        return (
            f"lora.targets=all-linear with {w.model.name} on engine=megatron: peft would adapt routed experts too, by "
            "the names of the shared ones; use targets=attention"
        )
    return None


# ---------------------------------------------------------------- Megatron's layers, on its engine and under ZeRO


@rule(says=lambda w: f"job.expert_load={w.job.expert_load:g} with {w.model.name}, which has no experts; leave it out")
def expert_load_of_experts(w: Workload) -> bool:
    """A model without experts has no load of experts."""
    return w.job.expert_load != 1 and not w.model.num_experts


@rule()
def balancing(w: Workload) -> str | None:
    """Expert balancing needs a trained router, and rows without padding, because padding would count as tokens."""
    chosen, model = w.job.balancing, w.model
    if chosen is None:
        return None
    if not model.num_experts:
        return f"job.balancing with {model.name}, which has no experts; leave it out"
    if model.approximate is not None:
        return f"job.balancing with {model.name}, whose routers no family describes; leave it out"
    if w.job.lora is not None or w.job.objective != "pretrain":
        why = "lora, which freezes routers" if w.job.lora else f"objective={w.job.objective}, whose padding would count"
        return f"job.balancing with {why}; leave it out, or pretrain all weights"
    if chosen.moe_router_bias_update_rate and model.traits.router != "sigmoid":
        return (
            f"moe_router_bias_update_rate={chosen.moe_router_bias_update_rate:g} with {model.name}, whose router has "
            "no expert bias; use 0, and an auxiliary loss"
        )
    if chosen.moe_expert_capacity_factor is not None and w.layout.engine != "megatron":
        return (
            f"moe_expert_capacity_factor={chosen.moe_expert_capacity_factor:g} on engine={w.layout.engine}, which "
            "drops no tokens; use engine=megatron, or null"
        )
    return None


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
    says=lambda w: (
        f"family={w.model.model_type} of {w.model.name} with implementation={w.layout.implementation}, which has "
        f"{', '.join(families_where('megatron'))}"
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
    model = w.model
    if not runs_megatron_layers(w.layout) or not model.rope_scaling:
        return None
    scaling = model.rope_scaling
    kind = scaling.get("rope_type", "default")
    if kind == "yarn" and model.latent and scaling.get("mscale", 1) == scaling.get("mscale_all_dim", 0):
        return None  # queries and keys then have the factor 1, and the layer applies the factor of the scores
    if kind in ("yarn", "longrope") and not model.latent and model.partial_rotary_factor == 1:
        return None  # the factor of queries and keys can be applied to the scores
    if kind not in ("default", "linear", "llama3"):
        return (
            f"rope_type={kind} of {model.name} with implementation={w.layout.implementation}, which computes default, "
            "linear, llama3 and, of whole heads, yarn and longrope; use implementation=huggingface on engine=deepspeed "
            "or torch"
        )
    return None


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
    says=lambda w: (
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
    says=lambda w: (
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
    says=lambda w: (
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
    says="sp=true with tp=1: sequence parallelism splits over the tensor-parallel ranks; use tp>1, or sp=false",
)
def sequence_parallel_needs_tp(w: Workload) -> bool:
    """model_parallel_config.py refuses sequence parallelism without tensor parallelism."""
    return w.layout.sp and runs_megatron_layers(w.layout) and w.layout.tp == 1


@rule(
    "deepspeed",
    "megatron",
    says=lambda w: (
        f"sp=true with seq_length={w.job.seq_length}, which tp·cp={w.layout.tp * w.layout.cp} does not divide; "
        f"use a multiple of {w.layout.tp * w.layout.cp}, or sp=false"
    ),
)
def sequence_parallel_divides(w: Workload) -> bool:
    """Sequence parallelism splits the rest of the sequence (after context parallelism) evenly over tp."""
    split = w.layout.sp and w.layout.tp > 1 and runs_megatron_layers(w.layout)
    return split and w.job.seq_length % (w.layout.tp * w.layout.cp) != 0
