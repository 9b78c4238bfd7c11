"""What a layout must satisfy to run: one small function a rule, each true to the engine it speaks for.

Memory is not a rule (``search`` weighs it), nor is taste: tensor parallelism across nodes is slow, but it runs.
Read in torch 2.13, deepspeed 0.19.8 and megatron-core 0.16.1; a docstring names the place that refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kit.cost.offload import host_ram_gib_per_node, nvme_gib_per_node
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import EngineName, Layout
from kit.specs.model import ModelSpec


@dataclass(frozen=True)
class Violation:
    """One broken rule."""

    rule: str
    """The rule's name."""
    message: str
    """Values, rule and nearest fix, on one line."""

    def __str__(self) -> str:
        return self.message


Check = Callable[[ModelSpec, ClusterSpec, JobSpec, Layout], str | None]
"""Returns the message of a violation, or None."""


@dataclass(frozen=True)
class Rule:
    """A check and the engines for which it holds."""

    check: Check
    engines: tuple[EngineName, ...] = ("torch", "deepspeed", "megatron")

    @property
    def name(self) -> str:
        """The function's name, which is the rule's."""
        return self.check.__name__

    def __call__(self, model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> Violation | None:
        if layout.engine not in self.engines:
            return None
        message = self.check(model, cluster, job, layout)
        return None if message is None else Violation(rule=self.name, message=message)


def violations(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> tuple[Violation, ...]:
    """Every rule that a layout breaks."""
    found = (rule(model, cluster, job, layout) for rule in RULES)
    return tuple(violation for violation in found if violation is not None)


def is_legal(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> bool:
    """Whether a layout breaks no rule; stops at the first."""
    return all(rule(model, cluster, job, layout) is None for rule in RULES)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return small + [number // i for i in reversed(small) if i * i != number]


def words(values: list[int]) -> str:
    """``1, 2 or 4``."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


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


# ---------------------------------------------------------------- torch and DeepSpeed


def data_parallel_only(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """These engines run a Hugging Face model whole on every rank."""
    split = [name for name in ("tp", "pp", "vp", "cp", "ep", "etp") if getattr(layout, name) > 1] + (
        ["sp"] if layout.sp else []
    )
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


# ---------------------------------------------------------------- Megatron


def megatron_rope(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """kit/engines/megatron/rope.py: kinds that frequencies alone express."""
    kind = (model.rope_scaling or {}).get("rope_type", "default")
    if kind not in ("default", "linear", "llama3"):
        return (
            f"rope_type={kind} of {model.name} on engine=megatron, which computes default, linear and llama3; "
            "use engine=deepspeed or torch"
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
    if not model.num_experts and model.ffn_hidden_size % layout.tp:
        fitting = [d for d in divisors(model.num_attention_heads) if model.ffn_hidden_size % d == 0]
        return (
            f"tp={layout.tp} does not divide ffn_hidden_size={model.ffn_hidden_size} of {model.name}; "
            f"use {words(fitting)}"
        )
    return None


def pipeline_divides_layers(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """transformer_block.py, get_num_layers_to_build: equal stages, unless a custom layout is given."""
    chunks = layout.pp * layout.vp
    if model.num_layers % chunks:
        given = f"pp={layout.pp}" if layout.vp == 1 else f"pp·vp={layout.pp}·{layout.vp}"
        near = [d for d in divisors(model.num_layers) if d <= 4 * chunks]
        return f"{given} does not divide num_layers={model.num_layers} of {model.name}; use {words(near)}"
    return None


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


def expert_parallel(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """moe_layer.py: experts are dealt out evenly; parallel_state.py: their ranks are those of a pipeline stage."""
    ep, etp, experts = layout.ep, layout.etp, model.num_experts
    if not experts:
        return f"ep={ep}, etp={etp} with {model.name}, which has no experts; leave them out" if ep * etp > 1 else None
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


_HF: tuple[EngineName, ...] = ("torch", "deepspeed")
_TORCH: tuple[EngineName, ...] = ("torch",)
_DEEPSPEED: tuple[EngineName, ...] = ("deepspeed",)
_MEGATRON: tuple[EngineName, ...] = ("megatron",)

RULES: tuple[Rule, ...] = (
    Rule(world_size),
    Rule(batch),
    Rule(precision),
    Rule(positions),
    Rule(implementation),
    Rule(data_parallel_only, _HF),
    Rule(torch_zero, _TORCH),
    Rule(no_offload, ("torch", "megatron")),
    Rule(offload_needs_zero, _DEEPSPEED),
    Rule(host_ram, _DEEPSPEED),
    Rule(nvme, _DEEPSPEED),
    Rule(megatron_rope, _MEGATRON),
    Rule(megatron_zero, _MEGATRON),
    Rule(tp_divides_heads, _MEGATRON),
    Rule(tp_fits_kv_heads, _MEGATRON),
    Rule(tp_divides_mlp, _MEGATRON),
    Rule(pipeline_divides_layers, _MEGATRON),
    Rule(virtual_stages, _MEGATRON),
    Rule(sequence_parallel, _MEGATRON),
    Rule(context_parallel, _MEGATRON),
    Rule(expert_parallel, _MEGATRON),
    Rule(expert_tensor_parallel, _MEGATRON),
    Rule(experts_need_sequence_parallel, _MEGATRON),
)
"""Every rule; order is the order of messages."""
