"""What a layout must satisfy to run: one small function a rule, each true to the engine it speaks for.

Memory is not a rule (``search`` weighs it), nor is taste: tensor parallelism across nodes is slow, but it runs.
Read in torch 2.13, deepspeed 0.19.8 and megatron-core 0.16.1; a docstring names the place that refuses.
"""

from __future__ import annotations

from kit.planner.rules.deepspeed import DEEPSPEED_RULES, MEGATRON_LAYERS
from kit.planner.rules.fast_path import FAST_PATH_RULES
from kit.planner.rules.fp8 import converted_by_torchao
from kit.planner.rules.megatron import MEGATRON_RULES
from kit.planner.rules.rule import Rule, Violation, divisors, words
from kit.planner.rules.support import SUPPORT_RULES
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import EngineName, Layout
from kit.specs.model import ModelSpec


def violations(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> tuple[Violation, ...]:
    """Every rule that a layout breaks."""
    found = (rule(model, cluster, job, layout) for rule in RULES)
    return tuple(violation for violation in found if violation is not None)


def is_legal(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> bool:
    """Whether a layout breaks no rule; stops at the first."""
    return all(rule(model, cluster, job, layout) is None for rule in RULES)


# ---------------------------------------------------------------- every engine


def world_size(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """A plan uses every GPU it was given."""
    if layout.world_size == cluster.num_gpus:
        return None
    inner = layout.tp * layout.pp * layout.cp
    if cluster.num_gpus % inner:
        return (
            f"tp·pp·cp={inner} does not divide the {cluster.num_gpus} GPUs of {cluster.name}; "
            f"use sizes whose product is {words(divisors(cluster.num_gpus))}"
        )
    return (
        f"dp·cp·tp·pp={layout.world_size} is not the {cluster.num_gpus} GPUs of {cluster.name}; "
        f"use dp={cluster.num_gpus // inner}"
    )


def batch(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """global_batch_size = micro_batch_size · gradient_accumulation_steps · dp, on every data-parallel rank the same."""
    wanted, unit = job.global_batch_size, layout.micro_batch_size * layout.dp
    if layout.global_batch_size == wanted:
        return None
    if wanted % unit == 0:
        return (
            f"micro_batch_size·gradient_accumulation_steps·dp={layout.global_batch_size} is not "
            f"global_batch_size={wanted}; use gradient_accumulation_steps={wanted // unit}"
        )
    below, above = wanted // unit * unit, (wanted // unit + 1) * unit
    nearest = f"{below} or {above}" if below else str(above)
    return (
        f"micro_batch_size·dp={layout.micro_batch_size}·{layout.dp} does not divide global_batch_size={wanted}; "
        f"use global_batch_size={nearest}"
    )


def precision(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Turing and older have no bf16 units; torch emulates it far slower than fp32."""
    if job.precision == "bf16" and cluster.gpu.bf16_tflops == 0:
        return (
            f"precision=bf16 on {cluster.gpu.name}, which has no bf16; "
            "use precision=fp16 with engine=deepspeed, fp32, or a GPU from Ampere on"
        )
    return None


def positions(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """A learned position table ends. RoPE does not: longer sequences run, which the plan then remarks."""
    if model.learned_positions and job.seq_length > model.max_position_embeddings:
        return (
            f"seq_length={job.seq_length} is longer than the {model.max_position_embeddings} learned positions of "
            f"{model.name}; use at most {model.max_position_embeddings}"
        )
    return None


TRANSFORMER_ENGINE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "mixtral", "qwen3_moe")
"""Those that megatron-core's own layer specs are for; the others differ inside a layer (kit/engines/megatron)."""


def implementation(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Megatron computes its own layers; torch and DeepSpeed those of transformers, DeepSpeed Megatron's too."""
    if layout.engine == "megatron" and layout.implementation == "transformer_engine":
        if model.family not in TRANSFORMER_ENGINE_FAMILIES:
            return (
                f"implementation=transformer_engine with family {model.family} of {model.name}: its layers are for "
                f"{', '.join(TRANSFORMER_ENGINE_FAMILIES)}; use local"
            )
        if cluster.gpu.device == "cuda":
            return None
        return "implementation=transformer_engine on CPU processes: its kernels are for GPUs; use local"
    wanted = "local" if layout.engine == "megatron" else "huggingface"
    if layout.engine == "deepspeed" and layout.implementation in MEGATRON_LAYERS:
        return None
    if layout.implementation != wanted:
        return f"implementation={layout.implementation} on engine={layout.engine}; use {wanted}"
    return None


def stacks(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Pairs are for an encoder-decoder, and it for pairs; Megatron-core's model here is a decoder."""
    if model.is_encoder_decoder != (job.objective == "seq2seq"):
        fix = "use seq2seq" if model.is_encoder_decoder else "use pretrain or sft, or an encoder-decoder"
        return f"objective={job.objective} with {model.name} of family {model.family}; {fix}"
    if model.is_encoder_decoder and layout.implementation != "huggingface":
        return (
            f"{model.name} of family {model.family} on Megatron-core's layers, which make decoders only; "
            "use implementation=huggingface on engine=torch or deepspeed"
        )
    return None


# ---------------------------------------------------------------- torch


def data_parallel_only(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """It runs a Hugging Face model, whose layers it cuts (kit/engines/torch/tensor_parallel.py) or leaves whole."""
    split = [name for name in ("pp", "vp", "cp", "ep", "etp") if getattr(layout, name) > 1]
    split += [name for name in ("sp", "first_stage_layers", "last_stage_layers") if getattr(layout, name)]
    if not split:
        return None
    given = ", ".join(f"{name}={getattr(layout, name)}" for name in split)
    return (
        f"{given} on engine={layout.engine}, which splits data and tensors only; use engine=megatron, or leave them out"
    )


def torch_tensor_parallel(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """kit/engines/torch/tensor_parallel.py: transformers' plans of columns and rows, with FSDP2 across."""
    if layout.tp == 1:
        return None
    if model.family not in CUT_BY_TRANSFORMERS:
        return (
            f"tp={layout.tp} on engine=torch with family {model.family}: it is done for "
            f"{', '.join(CUT_BY_TRANSFORMERS)}; use engine=megatron, or tp=1"
        )
    if layout.zero_stage == 0 or job.lora is not None:
        return (
            f"tp={layout.tp} on engine=torch goes with FSDP2 and whole weights; use zero_stage=2 or 3 without job.lora"
        )
    if model.num_key_value_heads % layout.tp or model.ffn_hidden_size % layout.tp:
        return (
            f"tp={layout.tp} does not divide num_key_value_heads={model.num_key_value_heads} and ffn_hidden_size="
            f"{model.ffn_hidden_size} of {model.name}; use a divisor of both"
        )
    return None


CUT_BY_TRANSFORMERS = ("llama", "mistral", "qwen2")
"""Families whose plan in transformers cuts linear layers by columns and rows, and nothing else."""


def torch_zero(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """kit/engines/torch/engine.py: DDP, or FSDP2, which shards gradients and optimizer state together."""
    if layout.zero_stage == 1:
        return (
            "zero_stage=1 on engine=torch, which has DDP (0) and FSDP2 (2 and 3); use one of these, or engine=deepspeed"
        )
    return None


def no_offload(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Only DeepSpeed moves state to the host here."""
    given = [name for name in ("offload_optimizer", "offload_param") if getattr(layout, name) != "none"]
    if given:
        place = getattr(layout, given[0])
        return f"{given[0]}={place} on engine={layout.engine}, which keeps its state on the GPU; use engine=deepspeed"
    return None


_TORCH: tuple[EngineName, ...] = ("torch",)

RULES: tuple[Rule, ...] = (
    Rule(world_size),
    Rule(batch),
    Rule(precision),
    Rule(positions),
    Rule(implementation),
    Rule(stacks),
    Rule(data_parallel_only, _TORCH),
    Rule(torch_zero, _TORCH),
    Rule(torch_tensor_parallel, _TORCH),
    Rule(converted_by_torchao, _TORCH),
    Rule(no_offload, ("torch", "megatron")),
    *DEEPSPEED_RULES,
    *MEGATRON_RULES,
    *SUPPORT_RULES,
    *FAST_PATH_RULES,
)
"""Every rule; order is the order of messages."""
