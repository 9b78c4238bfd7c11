"""How ranks split the work, and which of it a user pinned."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kit.specs.base import SPEC

EngineName = Literal["torch", "deepspeed", "megatron"]
ENGINES: tuple[EngineName, ...] = ("torch", "deepspeed", "megatron")
"""From the simplest to the one with the most to set."""
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "cpu", "nvme"]
"""Where state is kept between uses: on the device, in host memory, or on the node's own disks (ZeRO-Infinity)."""
Implementation = Literal["huggingface", "local", "transformer_engine"]
GradientCompression = Literal["none", "bf16", "powersgd"]
GradientDtype = Literal["fp32", "bf16"]
"""How fp32 gradients travel between data-parallel ranks: as they are, rounded to bf16, or as factors of low rank
(PowerSGD, arXiv 1905.13727)."""
LOSS_CHUNK_TOKENS = 2048
"""Tokens whose logits exist at once with ``chunked_loss``. The head's gradient, as large as the head, is read and
written for every chunk: with half as many tokens that takes as long as half of the chunk's products on an H100."""
FP8_MULTIPLE = 16
"""Every size of a product in 8 bits is a multiple of it (torch._scaled_mm)."""
AttentionKernel = Literal["default", "cudnn"]
"""Which of the kernels behind ``scaled_dot_product_attention`` is asked first: torch's choice (FlashAttention-2), or
cuDNN's, which is faster on Hopper and later."""
LossKernel = Literal["torch", "liger"]
"""What computes a chunk of the chunked loss: kit's own, or Liger's fused linear cross entropy (arXiv 2410.10989)."""
ContextExchange = Literal["all_gather", "p2p", "a2a"]
"""How context-parallel ranks see each other's keys and values, in Megatron's words (``cp_comm_type``): gathered whole,
passed round a ring, or exchanged for heads (DeepSpeed-Ulysses, arXiv 2309.14509)."""


@dataclass(frozen=True, kw_only=True, config=SPEC)
class Layout:
    """One complete choice. ``world_size = dp·cp·tp·pp``; experts are split otherwise: ``dp·cp·tp = edp·ep·etp``."""

    engine: EngineName
    implementation: Implementation
    """Which code computes a layer: Hugging Face's with torch's sdpa, or Megatron-core's without or with Transformer
    Engine. Megatron-core's layers under engine=deepspeed are ZeRO over tensor parallelism."""
    dp: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    pp: int = Field(default=1, gt=0)
    vp: int = Field(default=1, gt=0)
    """Virtual stages per pipeline rank; 1 = plain 1F1B."""
    first_stage_layers: int | None = Field(default=None, gt=0)
    """Layers of the first pipeline stage where stages are uneven; null: as many as the others."""
    last_stage_layers: int | None = Field(default=None, gt=0)
    cp: int = Field(default=1, gt=0)
    """Context parallelism: ranks that share out a sequence."""
    cp_comm_type: ContextExchange = "all_gather"
    """Read only with cp>1."""
    ep: int = Field(default=1, gt=0)
    """Expert parallelism: ranks that share out the experts of a layer, and exchange tokens."""
    etp: int = Field(default=1, gt=0)
    """Tensor parallelism inside each expert; with ep=1 it is that of everything else."""
    sp: bool = False
    """Sequence parallelism over the tensor-parallel group."""
    zero_stage: int = Field(default=0, ge=0, le=3)
    """torch: 0 = DDP. deepspeed: its stage. megatron: 1 = the distributed optimizer."""
    offload_optimizer: Offload = "none"
    offload_param: Offload = "none"
    zero_hpz: int = Field(default=1, gt=0)
    """ZeRO++: ranks over which parameters are sharded a second time, so that backward gathers inside a node
    (zero_hpz_partition_size, arXiv 2306.10209); 1 = off."""
    zero_quantized_weights: bool = False
    """ZeRO++: weights are gathered in int8."""
    zero_quantized_gradients: bool = False
    """ZeRO++: gradients are reduced in int4, by all-to-all."""
    gradient_compression: GradientCompression = "none"
    """torch: a communication hook of DDP. deepspeed: its communication_data_type."""
    gradient_dtype: GradientDtype = "fp32"
    """torch, FSDP2 with 8-bit AdamW: what gradients of matrices are kept in from backward to the step."""
    autocast: bool = False
    """deepspeed: bf16 by torch.autocast over fp32 weights (torch_autocast), not by bf16 weights with fp32 masters."""
    recompute: Recompute = "none"
    """full: only each layer's input is kept. selective: all but the inside of attention."""
    chunked_loss: bool = False
    """Hugging Face models: output projection and cross entropy in one, some tokens at a time, without all logits."""
    loss_kernel: LossKernel = "torch"
    """Read only with chunked_loss; liger on engine=torch and GPUs, where liger-kernel is installed."""
    compile_layers: bool = False
    """torch, and DeepSpeed below stage 3: torch.compile of every transformer block, and of the chunked loss."""
    attention_kernel: AttentionKernel = "default"
    """Hugging Face models on engine=torch."""
    micro_batch_size: int = Field(default=1, gt=0)
    """Sequences per data-parallel rank and forward pass."""
    gradient_accumulation_steps: int = Field(default=1, gt=0)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same expert parameters."""
        return max(1, self.dp * self.cp * self.tp // (self.ep * self.etp))

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp


@dataclass(frozen=True, kw_only=True, config=SPEC)
class Pins:
    """The part of a layout that a user decided; null leaves the choice to the planner."""

    engine: EngineName | None = None
    implementation: Implementation | None = None
    tp: int | None = Field(default=None, gt=0)
    pp: int | None = Field(default=None, gt=0)
    vp: int | None = Field(default=None, gt=0)
    first_stage_layers: int | None = Field(default=None, gt=0)
    last_stage_layers: int | None = Field(default=None, gt=0)
    cp: int | None = Field(default=None, gt=0)
    cp_comm_type: ContextExchange | None = None
    ep: int | None = Field(default=None, gt=0)
    etp: int | None = Field(default=None, gt=0)
    sp: bool | None = None
    zero_stage: int | None = Field(default=None, ge=0, le=3)
    offload_optimizer: Offload | None = None
    offload_param: Offload | None = None
    zero_hpz: int | None = Field(default=None, gt=0)
    zero_quantized_weights: bool | None = None
    zero_quantized_gradients: bool | None = None
    gradient_compression: GradientCompression | None = None
    gradient_dtype: GradientDtype | None = None
    autocast: bool | None = None
    recompute: Recompute | None = None
    chunked_loss: bool | None = None
    loss_kernel: LossKernel | None = None
    compile_layers: bool | None = None
    attention_kernel: AttentionKernel | None = None
    micro_batch_size: int | None = Field(default=None, gt=0)
