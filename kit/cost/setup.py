"""A training run in enough detail to account for its memory: shape, split, kernels, precision.

Richer than what a person writes (``ModelSpec``, ``JobSpec``) and than what the planner chooses (``Layout``): it also
describes runs of other programs, with latent attention, experts, uneven pipelines, fp8 or LoRA.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kit.cost.model.compression import ZeroPlusPlus
from kit.cost.model.liger_chunks import liger_chunk
from kit.cost.model.params import RankParameters
from kit.specs.families import Family, Traits
from kit.specs.layout import LOSS_CHUNK_TOKENS, ContextExchange

ComputePrecision = Literal["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
"""What GEMMs run in. fp8: one scale a tensor or larger block; mxfp8, nvfp4: a scale for 32 or 16 values."""

Attention = Literal["flash", "flash1", "cudnn", "unfused"]
"""flash1: the first version of flash-attn. flash: flash-attn's kernels. cudnn: cuDNN's fused attention. unfused:
scores are materialised."""

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
    """Norms of a layer, without those of queries and keys."""
    zero_centred_norm: bool = False
    """Norms scale by 1 + weight."""
    parallel_residual: bool = False
    """Attention and MLP read the same input (Phi-2)."""
    shared_norm: bool = True
    """With ``parallel_residual``: whether both read it through one norm."""
    capped_logits: bool = False
    """Logits go through a tanh (Gemma 2)."""
    traits: Traits | None = None
    """What the family of a Hugging Face model decides."""
    latent: LatentAttention | None = None
    experts: Experts | None = None
    expert_layers: tuple[bool, ...] = ()
    """For each layer, whether it has experts; empty without experts."""
    cross_attention_layers: int = 0
    """Layers that also attend to an encoder's output (a decoder's); ``num_layers`` counts both stacks."""
    mtp_layers: int = 0
    """Multi-token-prediction layers, after the last."""
    sliding_window: int | None = None
    """Positions that a token attends to; null = all before it."""
    full_attention_every: int = 0
    """Every so many layers, one attends to all positions in spite of the window; 0 = none does."""

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
    """Linear layers with adapters: query, key, value, projection, mlp, head."""
    four_bit: bool = False
    """QLoRA: the linear layers of the base model in nf4 (arXiv 2305.14314)."""


Code = Literal["fused", "compiled", "eager", "huggingface", "local"]
"""How element-wise operators of a layer run. fused: Megatron's, Transformer Engine's or nanotron's own kernels.
compiled: torch.compile. eager: one torch kernel an operator, in 16 bits. huggingface: the same with norms in fp32.
local: kit's Megatron layers."""


UNHIDDEN = 0.65
"""Share of the communication of FSDP and ZeRO-3 that compute does not hide. Estimated from rows (llm-foundry,
DeepSpeed's Azure and DeepCompile tables): the host waits for a gather before it issues the layer, and NCCL's kernels
take multiprocessors from the products."""
PREFETCHED = 0.25
"""Share that stays exposed where a compiler or Megatron-FSDP schedules collectives ahead; estimated from DeepCompile's
rows."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a setup does not say about a run because its memory does not depend on it."""

    engine: Literal["megatron", "fsdp", "ddp", "deepspeed"]
    code: Code
    precision: ComputePrecision
    linear_layers_only: bool = False
    """Whether only linear layers' products are in it, and those of head and experts in bf16 (torchao). Efficiencies of
    other programs in fp8 were estimated from rows as if every product were."""
    attention: Attention = "flash"
    overlaps_gradients: bool = True
    """Whether gradients are reduced, and weights gathered, beside compute (Megatron, DDP)."""
    overlaps_tensor_gradients: bool = True
    """Whether tensor-parallel reductions of backward run beside products of weight gradients."""
    overlaps_tensor_parallel: bool = False
    """Whether those of forward are cut into pieces beside the products (Transformer Engine's user buffers)."""
    overlaps_experts: bool = False
    """Whether exchanges of one micro batch run beside another's compute."""
    once_per_node: bool = False
    """Whether a token crosses the fabric once for all its experts on a node (DeepEP, HybridEP)."""
    graphs: Literal["none", "partial", "full"] = "none"
    """CUDA graphs: partial: all but the experts. full: of the whole step."""
    gradient_bytes: float = 4.0
    """Bytes of a gradient that is reduced over data-parallel ranks."""
    gradient_kernel_bytes: float = 0.0
    """Memory moved per gradient to compress it, once a step."""
    zero_plus_plus: ZeroPlusPlus | None = None
    keeps_gathered: bool = False
    """FSDP: whether gathered weights are kept from forward to backward."""
    balanced_context: bool = True
    """Whether context-parallel ranks share out the causal mask evenly (zig-zag order)."""
    unhidden_sharding: float = UNHIDDEN
    """FSDP, ZeRO-3: share of the exchanged weights and gradients that takes its time whatever compute is beside it."""
    splits_transfers: bool = False
    """Whether each tensor-parallel rank sends a part of what goes to the next stage, which gathers it there:
    Megatron-LM before it was a library (scatter_gather_tensors_in_pipeline, arXiv 2104.04473, section 4.1) and
    DeepSpeed's PipelineEngine (is_pipe_partitioned). Megatron-core sends whole activations, or under sequence
    parallelism what a rank has."""
    reduces_in_full: bool = False
    """Whether gradients are summed on all data-parallel ranks although each steps a part of the weights (DeepSpeed's
    BF16_Optimizer under its PipelineEngine: runtime/pipe/engine.py, _bf16_reduce_grads)."""
    gradient_sum_bytes: float = 10.0
    """Megatron without fusion: bytes moved per parameter and micro batch to add a 16-bit gradient to its fp32 sum."""
    offload_optimizer: Literal["none", "host", "device"] = "none"
    """Optimizer state in host memory: stepped there, or brought to the device for its step."""
    moment_bytes: float = 8.0
    """Bytes of the optimizer's moments per parameter."""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """One run. ``world_size = dp·cp·tp·pp``."""

    shape: Shape
    program: Program
    """The program that runs it."""
    kernels: str
    """The code that computes a layer, which decides what autograd saves of it: transformer_engine, megatron-local
    (without Transformer Engine and without kit), local (megatron-core's layer with norms and attention of
    kit/engines/megatron), or huggingface."""
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
    stage_layers: tuple[tuple[int, ...], ...] = ()
    """Layer numbers of every chunk, in pipeline order (chunk c is on stage c mod pp); empty = even."""
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
    activation_offload: bool = False
    cross_entropy: CrossEntropy = "unfused"
    chunked_loss: bool = False
    liger_loss: bool = False
    """chunked_loss by Liger's kernel, whose chunks have sizes of their own."""
    compiled_loss: bool = False
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
    gpu_generation: str = "unknown"
    element: int = 2
    """Bytes of an element that layers compute with."""
    autocast: bool = False
    """fp32 weights and residual stream, GEMMs in 16 bits (torch.autocast)."""
    exchange: ContextExchange = "p2p"
    """How context-parallel ranks see each other's keys and values."""

    parameters: tuple[RankParameters, ...] = ()
    """Parameters of a rank of each stage."""
    adapters: float | None = None
    """LoRA's parameters on a rank; null without."""
    dense_layer_matrices: float = 0.0
    """Elements of the matrices of a layer without experts, on a rank."""

    @cached_property
    def chunk_tokens(self) -> float:
        """Tokens whose logits exist at once with ``chunked_loss``."""
        if self.liger_loss:
            return liger_chunk(int(self.tokens), self.shape.vocab_size, self.shape.hidden_size)[1]
        return min(self.tokens, LOSS_CHUNK_TOKENS)

    @cached_property
    def tokens(self) -> float:
        """Tokens of a micro batch on one context-parallel rank."""
        return self.micro_batch_size * self.seq_length / self.cp

    @cached_property
    def shard_tokens(self) -> float:
        """Tokens of a micro batch on one rank where sequence parallelism splits them further."""
        return self.tokens / (self.tp if self.sp else 1)
