"""Rules of several engines: sizes, precision, and which jobs and layers each engine supports."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from operator import attrgetter
from typing import Any

from kit.cost.workload import Workload
from kit.planner.rules.rule import rule
from kit.specs.job import TRL
from kit.specs.layout import DEFAULTS, ENGINES, FLAGS, EngineName, Layout, divisors
from kit.specs.text import first, one_of

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
    message=lambda w: (
        f"seq_length={w.job.seq_length} is longer than the {w.model.max_position_embeddings} learned positions of "
        f"{w.model.name}; use at most {w.model.max_position_embeddings}"
    )
)
def positions(w: Workload) -> bool:
    """A learned position table has a fixed length. RoPE has none: longer sequences run, with a note in the plan."""
    return w.model.learned_positions and w.job.seq_length > w.model.max_position_embeddings


# ---------------------------------------------------------------- experts


@rule(
    "torch",
    "megatron",
    message=lambda w: f"ep={w.layout.ep}, etp={w.layout.etp} with {w.model.name}, which has no experts; leave them out",
)
def experts_exist(w: Workload) -> bool:
    """Expert parallelism is for models with experts."""
    return w.layout.ep * w.layout.etp > 1 and not w.model.num_experts


@rule(
    "torch",
    "megatron",
    message=lambda w: (
        f"ep={w.layout.ep} does not divide num_experts={w.model.num_experts} of {w.model.name}; "
        f"use {one_of(divisors(gcd(w.model.num_experts, w.cluster.num_gpus)))}"
    ),
)
def ep_divides_experts(w: Workload) -> bool:
    """megatron-core's moe_layer.py, transformers' MoEParamShard: every rank has the same number of experts."""
    return w.model.num_experts % w.layout.ep != 0


def _stage_ranks(w: Workload) -> int:
    return w.layout.dp * w.layout.cp * w.layout.tp


@rule(
    "torch",
    "megatron",
    message=lambda w: (
        f"ep·etp={w.layout.ep}·{w.layout.etp} does not divide the dp·cp·tp={_stage_ranks(w)} ranks of a pipeline "
        f"stage; use sizes whose product is {one_of(divisors(_stage_ranks(w)))}"
    ),
)
def ep_divides_ranks(w: Workload) -> bool:
    """Expert parallelism divides the ranks of a pipeline stage; a Hugging Face model has one."""
    return w.model.num_experts > 0 and _stage_ranks(w) % (w.layout.ep * w.layout.etp) != 0


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
    reasons = {
        f"engine={w.layout.engine}, which has no such heads; use engine=megatron": w.layout.engine != "megatron",
        f"objective={w.job.objective}; use pretrain": w.job.objective != "pretrain",
        "LoRA, which trains no weights": w.job.lora is not None,
        f"the tied embeddings of {w.model.name}": w.model.tied_embeddings,
    }
    return first(reasons, f"{said} with {{}}, or leave it out")


# ---------------------------------------------------------------- layers


def runs_megatron_layers(layout: Layout) -> bool:
    """Whether megatron-core's layers compute the model, on its own engine or under DeepSpeed's ZeRO."""
    return layout.implementation != "huggingface"


@rule(
    message=lambda w: (
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
    message=lambda w: (
        f"objective={w.job.objective} with {w.model.name} of family {w.model.family}; use "
        f"{'seq2seq' if w.model.is_encoder_decoder else 'pretrain or sft, or an encoder-decoder'}"
    )
)
def objective_of_stacks(w: Workload) -> bool:
    """An encoder-decoder trains on pairs, and pairs need an encoder-decoder."""
    return w.model.is_encoder_decoder != (w.job.objective == "seq2seq")


@rule("torch", "deepspeed")
def selective_recompute(w: Workload) -> str | None:
    """kit/engines/kernels/selective_recompute.py: what was compared and whose tensors are counted."""
    layout, model = w.layout, w.model
    if layout.recompute != "selective":
        return None
    reasons = {
        f"engine={layout.engine}": layout.engine != "torch",
        f"tp={layout.tp}, cp={layout.cp}": layout.tp * layout.cp > 1,
        f"the experts of {model.name}": model.num_experts > 0,
        f"{model.name}, whose layers are no plain decoder's with fused attention": (
            model.approximate is not None
            or model.is_encoder_decoder
            or model.latent is not None
            or not model.traits.fused_attention
        ),
        "job.lora": w.job.lora is not None,
        f"precision={w.job.precision}": w.job.precision == "fp8",
        "compile_layers or tiled_mlp": layout.compile_layers or layout.tiled_mlp,
    }
    return first(reasons, "recompute=selective with {}, where it was not tested; use none or full")


# ---------------------------------------------------------------- jobs


@rule(
    message=lambda w: (
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
    message=lambda w: (
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


@rule(message=lambda w: f"precision={w.job.precision} is not supported; use {one_of(_precisions(w.layout))}")
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
    split_rows = layout.implementation == "huggingface" and layout.tp == 1
    return ("pretrain", "sft") if own_attention or split_rows else ("pretrain",)


@rule(
    message=lambda w: (
        f"objective={w.job.objective} is not supported on engine={w.layout.engine} with this layout; use "
        f"{one_of(_objectives(w.layout))}"
        + ("" if _whole_samples(w.layout) else ", or engine=torch or deepspeed with tp=1, cp=1")
    )
)
def objective(w: Workload) -> bool:
    """Samples of SFT and of pairs have different lengths, and pairs a source; not every split supports this."""
    return w.job.objective not in _objectives(w.layout)


@rule(
    message=lambda w: f"job.expert_load={w.job.expert_load:g} with {w.model.name}, which has no experts; leave it out"
)
def expert_load_of_experts(w: Workload) -> bool:
    """A model without experts has no load of experts."""
    return w.job.expert_load != 1 and not w.model.num_experts


@rule()
def balancing(w: Workload) -> str | None:
    """Expert balancing needs a trained router, and rows without padding, because padding would count as tokens."""
    chosen, model = w.job.balancing, w.model
    if chosen is None:
        return None
    rate, capacity = chosen.moe_router_bias_update_rate, chosen.moe_expert_capacity_factor
    pretrain = "leave it out, or pretrain all weights"
    reasons = {
        f"job.balancing with {model.name}, which has no experts; leave it out": not model.num_experts,
        f"job.balancing with {model.name}, whose routers no family describes; leave it out": model.approximate,
        f"job.balancing with lora, which freezes routers; {pretrain}": w.job.lora,
        f"job.balancing with objective={w.job.objective}, whose padding would count; {pretrain}": (
            w.job.objective != "pretrain"
        ),
        f"moe_router_bias_update_rate={rate:g} with {model.name}, whose router has no expert bias; use 0, and an "
        "auxiliary loss": rate and model.traits.router != "sigmoid",
        f"moe_expert_capacity_factor={capacity or 0:g} on engine={w.layout.engine}, which drops no tokens; use "
        "engine=megatron, or null": capacity is not None and w.layout.engine != "megatron",
    }
    return first(reasons)
