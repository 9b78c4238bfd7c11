"""Rules of every engine: sizes, precision, and what each engine has of jobs and layers."""

from __future__ import annotations

from math import gcd

from kit.cost.workload import Workload
from kit.planner.divisors import divisors, one_of
from kit.planner.rules.rule import rule
from kit.specs.families import families_where
from kit.specs.layout import DEFAULTS, ENGINES, FLAGS, EngineName, Layout

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


@rule()
def positions(w: Workload) -> str | None:
    """A learned position table ends. RoPE does not: longer sequences run, which the plan then notes."""
    if w.model.learned_positions and w.job.seq_length > w.model.max_position_embeddings:
        return (
            f"seq_length={w.job.seq_length} is longer than the {w.model.max_position_embeddings} learned positions of "
            f"{w.model.name}; use at most {w.model.max_position_embeddings}"
        )
    return None


# ---------------------------------------------------------------- flags


@rule()
def flag_of_engine(w: Workload) -> str | None:
    """Flags of ``Layout`` name the engines that take them: others would ignore them silently."""
    engine = w.layout.engine
    given = [name for name in _FOREIGN[engine] if getattr(w.layout, name) != DEFAULTS[name]]
    if not given:
        return None
    able = [other for other in ENGINES if all(other in FLAGS[name].engines for name in given)]
    values = ", ".join(f"{name}={str(getattr(w.layout, name)).lower()}" for name in given)
    them = "them" if len(given) > 1 else "it"
    fix = f"use engine={one_of(able)}, or leave {them} out" if able else f"leave {them} out"
    return f"{values} on engine={engine}, which does not take {them}; {fix}"


_FOREIGN = {engine: [name for name, flag in FLAGS.items() if engine not in flag.engines] for engine in ENGINES}
_FOREIGN["deepspeed"].remove("pp")  # deepspeed_pipeline says why


# ---------------------------------------------------------------- layers


def runs_megatron_layers(layout: Layout) -> bool:
    """Whether megatron-core's layers compute the model, on its own engine or under DeepSpeed's ZeRO."""
    return layout.implementation != "huggingface"


@rule()
def implementation(w: Workload) -> str | None:
    """Megatron computes its own layers; torch and DeepSpeed those of transformers, DeepSpeed Megatron's too."""
    layout = w.layout
    has = _IMPLEMENTATIONS[layout.engine]
    if layout.implementation not in has:
        return f"implementation={layout.implementation} cannot run on engine={layout.engine}; use {has[0]}"
    return None


_IMPLEMENTATIONS: dict[EngineName, tuple[str, ...]] = {
    "torch": ("huggingface",),
    "deepspeed": ("huggingface", "local"),
    "megatron": ("local", "transformer_engine"),
}


@rule()
def objective_of_stacks(w: Workload) -> str | None:
    """An encoder-decoder trains on pairs, and pairs need an encoder-decoder."""
    if w.model.is_encoder_decoder != (w.job.objective == "seq2seq"):
        fix = "use seq2seq" if w.model.is_encoder_decoder else "use pretrain or sft, or an encoder-decoder"
        return f"objective={w.job.objective} with {w.model.name} of family {w.model.family}; {fix}"
    return None


@rule()
def recompute(w: Workload) -> str | None:
    """megatron-core's layer alone recomputes attention by itself (transformer/attention.py, core_attn)."""
    if w.layout.recompute == "selective" and w.layout.engine != "megatron":
        return "recompute=selective is not supported; use none or full"
    return None


@rule()
def cp_comm_type(w: Workload) -> str | None:
    """How each engine's context parallelism communicates; with cp=1 the value is not read."""
    layout = w.layout
    has = _CP_COMM_TYPES[layout.engine]
    if layout.cp_comm_type in has or (layout.cp == 1 and layout.cp_comm_type == "all_gather"):
        return None
    return (
        f"cp={layout.cp} with cp_comm_type={layout.cp_comm_type}, which engine={layout.engine} does not have; use "
        f"{one_of(has)}"
    )


_CP_COMM_TYPES: dict[EngineName, tuple[str, ...]] = {
    "torch": ("all_gather",),
    "deepspeed": ("a2a",),
    "megatron": ("all_gather", "p2p"),
}


# ---------------------------------------------------------------- jobs


@rule()
def bf16_units(w: Workload) -> str | None:
    """Turing and older have no bf16 units; torch emulates it far slower than fp32."""
    if w.job.precision == "bf16" and w.cluster.gpu.bf16_tflops == 0:
        return (
            f"precision=bf16 on {w.cluster.gpu.name}, which has no bf16; "
            "use precision=fp16 with engine=deepspeed, fp32, or a GPU from Ampere on"
        )
    return None


@rule("torch", "megatron")
def fp8_units(w: Workload) -> str | None:
    """Tensor cores multiply fp8 from Ada and Hopper on (compute capability 8.9); CPU processes emulate it."""
    gpu = w.cluster.gpu
    if w.job.precision == "fp8" and gpu.device == "cuda" and not gpu.fp8_tflops:
        return f"precision=fp8 on {gpu.name}, which has no fp8; use bf16, or a GPU of 2022 or newer (L4, H100)"
    return None


@rule()
def precision(w: Workload) -> str | None:
    """DeepSpeed scales the loss for fp16 with Hugging Face models; the other engines have fp8 and no fp16."""
    layout = w.layout
    has = ["bf16", "fp32"]
    if layout.engine != "deepspeed":
        has.append("fp8")
    elif not runs_megatron_layers(layout):
        has.append("fp16")
    if w.job.precision not in has:
        return f"precision={w.job.precision} is not supported; use {one_of(has)}"
    return None


@rule()
def optimizer(w: Workload) -> str | None:
    """bitsandbytes' 8-bit AdamW steps on engine=torch; the others have optimizers of their own."""
    name, has = w.job.optimizer.name, ["adamw"] + ["adamw-8bit"] * (w.layout.engine == "torch")
    if name == "adamw-8bit" and name not in has:
        return (
            f"optimizer.name=adamw-8bit on engine={w.layout.engine}, which has an optimizer of its own with fp32 "
            "moments; use engine=torch, or optimizer.name=adamw"
        )
    if name not in has:
        return f"optimizer.name={name} is not supported; use {one_of(has)}"
    return None


def _whole_samples(layout: Layout) -> bool:
    """Every rank computes its own samples with a Hugging Face model."""
    return layout.implementation == "huggingface" and layout.tp == layout.cp == 1


@rule()
def objective(w: Workload) -> str | None:
    """Rows and pairs have lengths of their own, positions and a source, which not every split hands on."""
    has = ["pretrain"]
    if _whole_samples(w.layout):
        has = ["pretrain", "sft", "seq2seq"]
    elif w.layout.engine == "megatron" and w.layout.implementation == "local":
        # Only our attention (kit/engines/megatron/model/attention.py) reads to which document a position belongs.
        has = ["pretrain", "sft"]
    if w.job.objective not in has:
        return f"objective={w.job.objective} is not supported; use {one_of(has)}"
    return None


@rule()
def lora(w: Workload) -> str | None:
    """Adapters are for whole Hugging Face layers; swapping to NVMe was not tried with frozen weights."""
    offload = (w.layout.offload_optimizer, w.layout.offload_param)
    if w.job.lora is not None and not (_whole_samples(w.layout) and "nvme" not in offload):
        return "lora={…} is not supported; leave it out"
    return None


# ---------------------------------------------------------------- Megatron's layers, on its engine and under ZeRO


@rule()
def balancing(w: Workload) -> str | None:
    """What balances experts needs experts whose router is trained, on rows without padding, which it would count."""
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


@rule("deepspeed", "megatron")
def megatron_family(w: Workload) -> str | None:
    """Layers and weight maps that the Megatron engine has."""
    if runs_megatron_layers(w.layout) and not w.model.traits.megatron:
        return (
            f"family={w.model.model_type} of {w.model.name} with implementation={w.layout.implementation}, which has "
            f"{', '.join(families_where('megatron'))}; use implementation=huggingface on engine=deepspeed or torch"
        )
    return None


@rule("deepspeed", "megatron")
def megatron_rope(w: Workload) -> str | None:
    """kit/engines/megatron/model/rope.py: kinds that frequencies alone express."""
    model = w.model
    if not runs_megatron_layers(w.layout) or not model.rope_scaling:
        return None
    scaling = model.rope_scaling
    kind = scaling.get("rope_type", "default")
    if kind == "yarn" and model.latent and scaling.get("mscale", 1) == scaling.get("mscale_all_dim", 0):
        return None  # the factor of queries and keys is then 1, and that of scores is the layer's
    if kind in ("yarn", "longrope") and not model.latent and model.partial_rotary_factor == 1:
        return None  # the factor of queries and keys is one of the scores
    if kind not in ("default", "linear", "llama3"):
        return (
            f"rope_type={kind} of {model.name} with implementation={w.layout.implementation}, which computes default, "
            "linear, llama3 and, of whole heads, yarn and longrope; use implementation=huggingface on engine=deepspeed "
            "or torch"
        )
    return None


def whole_tp(w: Workload, divides_kv_heads: bool = False) -> str:
    """Sizes of tensor parallelism that the GPUs and every width of the model allow, as text."""
    model = w.model
    dense = not model.num_experts or model.first_dense_layers > 0
    return one_of(
        tp
        for tp in divisors(gcd(w.cluster.num_gpus, model.num_attention_heads))
        if (model.num_key_value_heads % tp == 0 or (tp % model.num_key_value_heads == 0 and not divides_kv_heads))
        and not (dense and model.ffn_hidden_size % tp)
    )


@rule("deepspeed", "megatron")
def tp_divides_heads(w: Workload) -> str | None:
    """Megatron: transformer_config.py, num_attention_heads is a multiple of tensor_model_parallel_size. AutoTP splits
    whole heads too."""
    if w.model.num_attention_heads % w.layout.tp:
        return (
            f"tp={w.layout.tp} does not divide num_attention_heads={w.model.num_attention_heads} of {w.model.name}; "
            f"use {whole_tp(w)}"
        )
    return None


@rule("deepspeed", "megatron")
def tp_fits_kv_heads(w: Workload) -> str | None:
    """transformer_config.py: num_query_groups is a multiple or a divisor of tensor_model_parallel_size. Fewer heads
    than ranks are shared (attention.py gathers them). AutoTP is stricter (``autotp_divides_kv_heads``)."""
    heads, tp = w.model.num_key_value_heads, w.layout.tp
    if runs_megatron_layers(w.layout) and heads % tp and tp % heads:
        return (
            f"tp={tp} is neither a divisor nor a multiple of num_key_value_heads={heads} of {w.model.name}; "
            f"use {whole_tp(w)}"
        )
    return None


@rule("deepspeed", "megatron")
def tp_divides_mlp(w: Workload) -> str | None:
    """tensor_parallel/layers.py: ColumnParallelLinear divides its output size."""
    model = w.model
    dense = not model.num_experts or model.first_dense_layers > 0
    if dense and model.ffn_hidden_size % w.layout.tp:
        return (
            f"tp={w.layout.tp} does not divide ffn_hidden_size={model.ffn_hidden_size} of {model.name}; "
            f"use {whole_tp(w)}"
        )
    return None


@rule("deepspeed", "megatron")
def sequence_parallel_needs_tp(w: Workload) -> str | None:
    """model_parallel_config.py refuses sequence parallelism without tensor parallelism."""
    if w.layout.sp and runs_megatron_layers(w.layout) and w.layout.tp == 1:
        return "sp=true with tp=1: sequence parallelism splits over the tensor-parallel ranks; use tp>1, or sp=false"
    return None


@rule("deepspeed", "megatron")
def sequence_parallel_divides(w: Workload) -> str | None:
    """Each of the tensor-parallel ranks has an equal part of the sequence that context parallelism leaves."""
    parts = w.layout.tp * w.layout.cp
    if w.layout.sp and w.layout.tp > 1 and runs_megatron_layers(w.layout) and w.job.seq_length % parts:
        return (
            f"sp=true with seq_length={w.job.seq_length}, which tp·cp={parts} does not divide; "
            f"use a multiple of {parts}, or sp=false"
        )
    return None
