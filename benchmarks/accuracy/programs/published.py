"""A published run: kit's workload, and what only other people's programs have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from benchmarks.accuracy.programs.adapters import PublishedLora, adapted, adapter_parameters
from kit.cost.memory.parts import EngineMemory
from kit.cost.model.lora import AdaptedLayer
from kit.cost.model.params import RankParameters, stage_parameters
from kit.cost.workload import UNHIDDEN, ExecutionModel, Workload
from kit.specs.families import Norm, Traits
from kit.specs.model import ModelSpec
from kit.specs.validation import spec


@spec
class PublishedModel(ModelSpec):
    """A decoder of no family of kit: norms, biases and positions as published. Its vocabulary is padded."""

    norm: Norm = "rmsnorm"
    gated_mlp: bool = True
    qk_norm: bool = False  # type: ignore[assignment]
    shared_ffn_hidden_size: int = 0

    def __post_init__(self) -> None:
        """The rules of kit's families do not hold."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def traits(self) -> Traits:
        """As published: what a family would decide."""
        return Traits(
            norm=self.norm,
            gated_mlp=self.gated_mlp,
            biases=self.biases or "none",
            qk_norm="head" if self.qk_norm else "none",
            positions=self.positions or "rope",
        )

    @property
    def key_value_width(self) -> int:
        """Width of all key heads together."""
        even = self.hidden_size // self.num_attention_heads
        return self.num_key_value_heads * (even if self.latent else self.head_dim)


def model_of(sizes: dict[str, Any], **more: Any) -> PublishedModel:
    """Sizes of a row's ``model``, as allocated; ``more``: fields that a row does not have under kit's names."""
    heads, moe, latent = sizes["num_attention_heads"], sizes.get("moe") or {}, more.get("latent")
    head_dim = sizes.get("head_dim") or sizes["hidden_size"] // heads
    return PublishedModel(
        **{
            "name": "published",
            "family": "llama",
            "num_layers": sizes["num_layers"],
            "hidden_size": sizes["hidden_size"],
            "ffn_hidden_size": sizes["ffn_hidden_size"],
            "num_attention_heads": heads,
            "num_key_value_heads": sizes.get("num_key_value_heads") or heads,
            "head_dim": latent.query_head_dim if latent else head_dim,
            "vocab_size": sizes["vocab_size"],
            "max_position_embeddings": sizes["seq_length"],
            "tied_embeddings": bool(sizes.get("tied_embeddings")),
            "gated_mlp": bool(sizes.get("gated_mlp")),
            "num_experts": moe.get("num_experts", 0),
            "experts_per_token": moe.get("experts_per_token", 0),
            "moe_ffn_hidden_size": moe.get("moe_ffn_hidden_size", 0),
            "shared_ffn_hidden_size": moe.get("shared_expert_ffn_hidden_size") or 0,
            **more,
        }
    )


@dataclass(frozen=True, kw_only=True)
class PublishedExecution(ExecutionModel):
    """How a program ran."""

    overlaps_tensor_parallel: bool = False
    """Whether tensor-parallel collectives of forward are cut into pieces beside the GEMMs (Transformer Engine's user
    buffers)."""
    overlaps_experts: bool = False
    """Whether all-to-alls of one micro batch run beside another's compute."""
    once_per_node: bool = False
    """Whether a token is sent once to each node that has one of its experts (DeepEP, HybridEP)."""
    graphs: Literal["none", "partial", "full"] = "none"
    """CUDA graphs: partial: all but the experts. full: of the whole step."""
    balanced_context: bool = True
    """Whether context-parallel ranks share out the causal mask evenly (zig-zag order)."""
    unhidden_sharding: float = UNHIDDEN
    """FSDP, ZeRO-3: share of the collectives that no compute hides."""
    splits_transfers: bool = False
    """Whether each tensor-parallel rank sends a part of what goes to the next stage, which gathers it there:
    Megatron-LM before it was a library (scatter_gather_tensors_in_pipeline, arXiv 2104.04473, section 4.1) and
    DeepSpeed's PipelineEngine (is_pipe_partitioned). Megatron-core sends whole activations, or under sequence
    parallelism what a rank has."""
    reduces_in_full: bool = False
    """Whether gradients are summed on all data-parallel ranks although each steps a part of the weights (DeepSpeed's
    BF16_Optimizer under its PipelineEngine: runtime/pipe/engine.py, _bf16_reduce_grads)."""
    matmul_share: float = 1.0
    """Rate of GEMMs over the catalog's: row-wise scales of fp8, a GPU under a power limit."""
    copies_gathered: bool = False
    """FSDP2: whether weights and gradients are copied out of and into the buffers of collectives."""
    deepcompile: bool = False
    """Whether DeepSpeed's compiler schedules ZeRO-3's collectives, instead of hooks around every module."""
    reuse_distance: float = 1e9
    """Elements of DeepSpeed's stage3_max_reuse_distance, by default as in runtime/zero/config.py; 0: as kit sets it."""
    copies_of_ranks: bool = False
    """ZeRO-3 before torch gathered into one tensor (DeepSpeed of 2021): collectives of lists, which copy each rank's
    part by a kernel of its own."""
    host_threads: int | None = None  # type: ignore[misc]
    """Threads of a rank's step in host memory; None: all cores are shared out."""
    offload_to_step_on_device: bool = False
    """Whether optimizer state that lives in host memory is brought to the device for its step."""


@dataclass(frozen=True, kw_only=True)
class PublishedWorkload(Workload):
    """One published run. Fields of the same name stand for properties of a plan's workload."""

    model: PublishedModel
    implementation: str = "transformer_engine"
    """Whose code computes a layer: as in kit, or megatron-local, litgpt, torchtune, torchtitan, nanotron."""
    execution: PublishedExecution = PublishedExecution(engine="megatron", code="fused", precision="bf16")
    attention: str = "flash"
    generation: str = "unknown"
    stated_chunks: tuple[tuple[int, ...], ...] = ()
    """Layer numbers of every pipeline chunk where the split is not even; empty where it is."""
    keeps_outputs: bool = False
    engine: EngineMemory | None = None
    """What DeepSpeed held; null for all others, whose states follow from the widths."""

    element: int = 2
    autocast: bool = False
    weight_bytes: int = 2
    main_gradient_bytes: int = 4
    """Width of accumulated gradients."""
    optimizer_bytes: float = 12.0
    """Master weights where they are a copy, and optimizer state, per parameter."""
    matrix_optimizer_bytes: float | None = None
    """Where matrices of the layers are treated otherwise (Muon keeps one moment); null = as all."""
    optimizer_instances: int = 1
    """Megatron: replicas of a sharded optimizer state (``--num-distributed-optimizer-instances``)."""
    optimizer_offload: float = 0.0
    """Fraction of optimizer state that lives in host memory."""
    optimizer_in_backward: bool = False
    keeps_bf16_weights: bool = True
    """Whether fp8 weights are copies beside 16-bit ones (cached per step) rather than instead of them."""

    hidden_dropout: bool = False
    attention_dropout: bool = False
    capacity_factor: float = 1.0
    """Most tokens of an expert over the even share."""
    grouped_gemm: bool = True
    lora: PublishedLora | None = None

    recomputes_by_operator: bool = False
    """Whether it is kit's own list; torchtitan's is a module here."""
    recompute_modules: frozenset[str] = frozenset()
    """For selective: Megatron's module names, or the per-operator policy ``op`` of torchtitan."""
    recompute_every: int = 1
    """full: only the input of every so many layers is saved (Megatron's ``uniform``)."""
    recompute_layers: int | None = None
    """full: only so many layers of each chunk are recomputed (Megatron's ``block``); null = all."""
    parameters_offload: bool = False
    """Whether weights, gradients and optimizer state live in host memory (FSDP's CPUOffload)."""
    activation_offload: bool = False
    offloaded_layers: int = 0
    """First layers of which everything that is saved goes to the host (Megatron's ``--cpu-offloading-num-layers``)."""
    graphed_attention: bool = False
    """Whether CUDA graphs of attention are captured before the first step (``--cuda-graph-warmup-steps 0``)."""
    overlapped_layers: bool = False
    """Whether a layer's forward runs beside another one's backward (``--overlap-moe-expert-parallel-comm``)."""
    cross_entropy: Literal["unfused", "native", "te"] = "unfused"
    """Megatron's three losses: plain, ``--cross-entropy-fusion-impl native`` and ``te``."""
    compiled: bool = False
    """torch.compile of the layers."""
    compiled_loss: bool = False
    holds_logits: bool = False
    """Whether the training loop keeps the fp32 logits that the model returned until its next step (fsdp_qlora)."""
    recomputes_cudnn: bool = False
    """torchtitan, selective: whether cuDNN's attention is computed once more, on GPUs where it is chosen."""
    uncounted_layers: int = 0
    """torchtitan, selective: layers whose GEMMs the policy does not know, and so recomputes (nvfp4)."""
    reserved: bool = False
    """Whether memory is asked for that the allocator reserved, rather than what tensors took of it."""
    gradient_accumulation_fusion: bool = False
    defer_embedding_gradient: bool = False
    """Megatron's ``--defer-embedding-wgrad-compute``."""
    gathers_again: bool = True
    """With sequence parallelism: whether backward gathers inputs of GEMMs once more, or forward keeps them."""
    deterministic: bool = False
    """Megatron's ``--deterministic-mode``: larger cuBLAS workspaces, fewer attention kernels."""

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """As stated, or runs of one length; where they do not divide, the first are longer by one."""
        return self.stated_chunks or even_chunks(self.num_layers, self.layout.pp * self.layout.vp)

    @property
    def offloads(self) -> bool:
        """Whether optimizer state or weights live in host memory."""
        places = {self.layout.offload_optimizer, self.layout.offload_param}
        return self.execution.offload_to_step_on_device or places != {"none"}

    @cached_property
    def parameters(self) -> tuple[RankParameters, ...]:
        """What a rank of each stage holds."""
        layout = self.layout.but(engine="megatron", implementation="transformer_engine")  # which split the vocabulary
        return stage_parameters(self.model, layout, self.chunks)

    @cached_property
    def adapted(self) -> tuple[AdaptedLayer, ...]:
        """The layers with an adapter, as published."""
        return () if self.lora is None else adapted(self, self.lora)

    @cached_property
    def adapters(self) -> float | None:
        """LoRA's parameters on a rank of the first stage; null without."""
        return None if self.lora is None else adapter_parameters(self, self.lora, 0)

    @cached_property
    def recomputed_share(self) -> float:  # type: ignore[override]
        """Share of the layers that full recompute computes once more."""
        chunk = self.num_layers / (self.layout.pp * self.layout.vp)
        return 1.0 if self.recompute_layers is None else min(1.0, self.recompute_layers / chunk)


def even_chunks(num_layers: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """``parts`` runs of layers of one length; where they do not divide, the first are longer by one."""
    return runs_of([num_layers // parts + (part < num_layers % parts) for part in range(parts)])


def runs_of(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Numbers from 0 in runs of these lengths."""
    return tuple(tuple(range(end - size, end)) for end, size in zip(accumulate(sizes), sizes, strict=True))


def chunks_with_ends(num_layers: int, parts: int, mtp_layers: int = 0) -> tuple[tuple[int, ...], ...]:
    """The same where embedding and loss (and prediction layers) count as a layer each: numbers 0 and from the last."""
    chunks = even_chunks(num_layers + 2 + mtp_layers, parts)
    return tuple(tuple(layer - 1 for layer in part if 1 <= layer <= num_layers) for part in chunks)
