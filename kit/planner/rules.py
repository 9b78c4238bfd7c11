"""What a layout must satisfy to run: one small function a rule, each true to the engine it speaks for.

Memory is not a rule (``search`` weighs it), nor is taste: tensor parallelism across nodes is slow, but it runs.
Read in torch 2.13, deepspeed 0.19.8 and megatron-core 0.16.1; a docstring names the place that refuses.
"""

from __future__ import annotations

from kit.cost.offload import host_ram_gib_per_node, nvme_gib_per_node
from kit.planner.megatron_rules import MEGATRON_RULES
from kit.planner.rule import Rule, Violation, divisors, words
from kit.planner.support_rules import SUPPORT_RULES
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
        return f"precision=bf16 on {cluster.gpu.name}, which has no bf16; use precision=fp32, or a GPU from Ampere on"
    return None


def positions(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """A learned position table ends. RoPE does not: longer sequences run, which the plan then remarks."""
    if model.learned_positions and job.seq_length > model.max_position_embeddings:
        return (
            f"seq_length={job.seq_length} is longer than the {model.max_position_embeddings} learned positions of "
            f"{model.name}; use at most {model.max_position_embeddings}"
        )
    return None


def implementation(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Megatron computes its own layers; torch and DeepSpeed those of transformers."""
    wanted = "torch-native" if layout.engine == "megatron" else "huggingface-sdpa"
    if layout.implementation != wanted:
        return f"implementation={layout.implementation} on engine={layout.engine}; use {wanted}"
    return None


def stacks(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Pairs are for an encoder-decoder, and it for pairs; Megatron-core's model here is a decoder."""
    if model.is_encoder_decoder != (job.objective == "seq2seq"):
        fix = "use seq2seq" if model.is_encoder_decoder else "use pretrain or sft, or an encoder-decoder"
        return f"objective={job.objective} with {model.name} of family {model.family}; {fix}"
    if model.is_encoder_decoder and layout.engine == "megatron":
        return (
            f"{model.name} of family {model.family} on engine=megatron, which has decoders only; use torch or deepspeed"
        )
    return None


# ---------------------------------------------------------------- torch and DeepSpeed


def data_parallel_only(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """These engines run a Hugging Face model whole on every rank."""
    split = [name for name in ("tp", "pp", "vp", "cp", "ep", "etp") if getattr(layout, name) > 1]
    split += [name for name in ("sp", "first_stage_layers", "last_stage_layers") if getattr(layout, name)]
    if not split:
        return None
    given = ", ".join(f"{name}={getattr(layout, name)}" for name in split)
    return f"{given} on engine={layout.engine}, which splits data only; use engine=megatron, or leave them out"


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
    usable = 0.9 * cluster.host_ram_gib  # the rest is the system's, the page cache's and the data loader's
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


_HF: tuple[EngineName, ...] = ("torch", "deepspeed")
_TORCH: tuple[EngineName, ...] = ("torch",)
_DEEPSPEED: tuple[EngineName, ...] = ("deepspeed",)

RULES: tuple[Rule, ...] = (
    Rule(world_size),
    Rule(batch),
    Rule(precision),
    Rule(positions),
    Rule(implementation),
    Rule(stacks),
    Rule(data_parallel_only, _HF),
    Rule(torch_zero, _TORCH),
    Rule(no_offload, ("torch", "megatron")),
    Rule(offload_needs_zero, _DEEPSPEED),
    Rule(host_ram, _DEEPSPEED),
    Rule(nvme, _DEEPSPEED),
    *MEGATRON_RULES,
    *SUPPORT_RULES,
)
"""Every rule; order is the order of messages."""
