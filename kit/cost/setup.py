"""A training run in enough detail to account for its memory: shape, split, kernels, precision.

Richer than what a person writes (``ModelSpec``, ``JobSpec``) and than what the planner chooses (``Layout``): it also
describes runs of other programs, with latent attention, experts, uneven pipelines, fp8 or LoRA.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kit.cost.params import RankParameters
from kit.cost.states import StateBytes
from kit.specs.families import Family, Traits
from kit.specs.layout import ContextExchange

Kernels = Literal[
    "transformer_engine",
    "megatron-local",
    "local",
    "huggingface",
    "nanotron",
    "litgpt",
    "torchtune",
    "torchtitan",
]
"""Whose code computes a layer, which decides what autograd keeps of it. local: megatron-core's layer with norms
and attention of ``kit/engines/megatron``. huggingface: transformers with torch's sdpa."""

Generation = Literal["ampere", "hopper", "blackwell", "other"]

Attention = Literal["flash", "cudnn", "unfused"]
"""flash: flash-attn's kernels. cudnn: cuDNN's fused attention. unfused: scores are materialised."""

CrossEntropy = Literal["unfused", "native", "te"]
"""Megatron's three losses: plain, ``--cross-entropy-fusion-impl native`` and ``te``."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention (arXiv 2405.04434, section 2.1). Widths per head unless ranks."""

    q_lora_rank: int | None
    """Width of the compressed query; null = queries are projected in one step."""
    kv_lora_rank: int
    nope_head_dim: int
    """Part of a query or key head without positions."""
    rope_head_dim: int
    value_head_dim: int

    @property
    def query_head_dim(self) -> int:
        """Width of a query or key head, both parts."""
        return self.nope_head_dim + self.rope_head_dim


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts."""

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    """All shared experts together; 0 = none."""
    capacity_factor: float | None = None
    """Most tokens of an expert over the even share; null = none are dropped."""
    grouped_gemm: bool = True


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """What a planned engine holds beside activations, where that follows from model and layout alone.

    Bytes per parameter for dense parameters and experts, and absolute bytes of buffers.
    """

    dense: StateBytes
    experts: StateBytes
    adapters: tuple[float, ...] = ()
    """LoRA's parameters on each stage; then everything else is frozen. Empty without."""
    of_adapters: StateBytes | None = None
    matrix_weights: float | None = None
    """Bytes of an element of the layers' matrices where they are quantised; null: as all weights."""
    most_step_extra: float = float("inf")
    """Bytes that a step converts at a time."""
    buffers: float = 0.0
    """Buckets that stay."""
    gathered: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Weights, gradients and buckets that come and go: in the loss, in a layer's backward, at the end of backward."""
    root_is_last: bool = False
    """Whether what is there at the end of backward comes when the last layer's own tensors have gone (FSDP2's root)."""
    autocast_copies: tuple[float, float] = (0.0, 0.0)
    """16-bit casts of fp32 weights that exist: when forward has ended, while the loss is computed and after."""
    waiting_gradient: float = 0.0
    """Of the head, until the embedding's is there, where they are one table: autograd hands over their sum. (FSDP2's is
    among what is gathered.)"""
    load: float = 0.0
    """Bytes per parameter while the model is built; 0: no more than what stays."""
    largest_parameter: int = 0
    """Elements; what an export gathers at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """A decoder-only transformer. Sizes are per model, never per rank. Compared by identity: it keys caches."""

    family: Family | None = None
    """Decides details of Hugging Face layers; null where none of them runs."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Padded: the rows that are allocated."""
    gated_mlp: bool
    tied_embeddings: bool
    norm: Literal["rmsnorm", "layernorm"]
    learned_positions: int = 0
    """Rows of the position table; 0 = RoPE."""
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    hidden_dropout: bool = False
    attention_dropout: bool = False
    norms_per_layer: int = 2
    """Beside those of queries and keys."""
    zero_centred_norm: bool = False
    """Norms scale by 1 + weight."""
    parallel_residual: bool = False
    """Attention and MLP read the same input (Phi-2)."""
    shared_norm: bool = True
    """There: through one norm."""
    capped_logits: bool = False
    """Logits go through a tanh (Gemma 2)."""
    traits: Traits | None = None
    """What the family of a Hugging Face model decides."""
    latent: LatentAttention | None = None
    experts: Experts | None = None
    expert_layers: tuple[bool, ...] = ()
    """Which layers have experts; empty without experts."""
    cross_attention_layers: int = 0
    """Layers that also attend to an encoder's output (a decoder's); ``num_layers`` counts both stacks."""
    mtp_layers: int = 0
    """Multi-token-prediction layers, after the last."""
    sliding_window: int | None = None
    """Positions that a token attends to; null = all before it."""
    full_attention_every: int = 0
    """Every such layer attends to all positions all the same; 0 = none does."""

    @property
    def query_width(self) -> int:
        """All query heads together."""
        return self.num_attention_heads * (self.latent.query_head_dim if self.latent else self.head_dim)

    @property
    def value_width(self) -> int:
        """All heads of the attention's output together."""
        return self.num_attention_heads * (self.latent.value_head_dim if self.latent else self.head_dim)

    @property
    def key_value_width(self) -> int:
        """All key heads together (without latent attention)."""
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """8-bit compute."""

    keeps_bf16_weights: bool = True
    """Whether fp8 weights are copies beside 16-bit ones (cached per step) rather than instead of them."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685); the base model is frozen."""

    rank: int
    targets: frozenset[str]
    """Of query, key, value, projection, mlp, head."""
    four_bit: bool = False
    """QLoRA: the linear layers of the base model in nf4 (arXiv 2305.14314)."""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """One run. ``world_size = dp·cp·tp·pp``."""

    shape: Shape
    kernels: Kernels
    attention: Attention
    seq_length: int
    micro_batch_size: int
    micro_batches: int
    """Per optimizer step."""
    dp: int = 1
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False
    sharding: Literal["none", "optimizer", "gradients", "full"] = "none"
    """optimizer: Megatron's distributed optimizer or ZeRO-1. gradients: ZeRO-2. full: FSDP or ZeRO-3."""
    optimizer_instances: int = 1
    """Megatron: replicas of a sharded optimizer state (``--num-distributed-optimizer-instances``)."""
    stage_layers: tuple[tuple[int, ...], ...] = ()
    """Layer numbers of every chunk, in pipeline order (chunk c lies on stage c mod pp); empty = even."""
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_every: int = 1
    """full: only the input of every so many layers is kept (Megatron's ``uniform``)."""
    recompute_layers: int | None = None
    """full: only so many layers of each chunk are computed again (Megatron's ``block``); null = all."""
    recompute_modules: frozenset[str] = frozenset()
    """For selective: Megatron's module names, or the per-operator policy ``op`` of torchtitan."""
    weight_bytes: int = 2
    main_gradient_bytes: int = 4
    """What gradients are accumulated in."""
    optimizer_bytes: float = 12.0
    """Master weights where they are a copy, and optimizer state, per parameter."""
    matrix_optimizer_bytes: float | None = None
    """Where matrices of the layers are treated otherwise (Muon keeps one moment); null = as all."""
    optimizer_offload: float = 0.0
    """Fraction of optimizer state that lives in host memory."""
    optimizer_in_backward: bool = False
    activation_offload: bool = False
    cross_entropy: CrossEntropy = "unfused"
    chunked_loss: bool = False
    compiled: bool = False
    """torch.compile of the layers."""
    liger_loss: bool = False
    """chunked_loss by Liger's kernel, whose chunks have sizes of their own."""
    compiled_loss: bool = False
    gathers_again: bool = True
    """With sequence parallelism: whether backward gathers inputs of matrix products again, or forward keeps them."""
    gradient_accumulation_fusion: bool = True
    defer_embedding_gradient: bool = False
    """Megatron's ``--defer-embedding-wgrad-compute``."""
    keeps_outputs: bool = False
    """Pipeline stages keep what they have sent (megatron-core's ``deallocate_pipeline_outputs`` off)."""
    deterministic: bool = False
    """Megatron's ``--deterministic-mode``: larger cuBLAS workspaces, fewer attention kernels."""
    fp8: Fp8 | None = None
    compiled_layers: bool = False
    """Whether casts to 8 bits are parts of other kernels."""
    lora: Lora | None = None
    gpu_generation: Generation = "other"
    element: int = 2
    """Bytes of an element that layers compute with."""
    autocast: bool = False
    """fp32 weights and residual stream, matrix products in 16 bits (torch.autocast)."""
    exchange: ContextExchange = "p2p"
    """How context-parallel ranks see each other's keys and values."""
    parameters: tuple[RankParameters, ...] = ()
    """Of a rank of each stage; empty: counted from the shape."""
    adapters: float | None = None
    """LoRA's parameters on a rank, exact; null: counted from the shape."""
    planned: EngineMemory | None = None
    """States and buffers of a plan's engine; null: they follow from the widths above."""

    @cached_property
    def tokens(self) -> float:
        """Tokens of a micro batch on one context-parallel rank."""
        return self.micro_batch_size * self.seq_length / self.cp

    @cached_property
    def shard_tokens(self) -> float:
        """The same where sequence parallelism splits them further."""
        return self.tokens / (self.tp if self.sp else 1)
