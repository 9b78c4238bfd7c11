"""Which program runs a training setup, as far as its speed depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kit.cost.compression import ZeroPlusPlus
from kit.cost.machine import ComputePrecision

Code = Literal["fused", "compiled", "eager", "huggingface", "local"]
"""How element-wise operators of a layer run. fused: Megatron's, Transformer Engine's or nanotron's own kernels.
compiled: torch.compile. eager: one torch kernel an operator, in 16 bits. huggingface: the same with norms in fp32.
local: kit's Megatron layers."""


UNHIDDEN = 0.65
"""Of what FSDP and ZeRO-3 exchange. Estimated from rows (llm-foundry, DeepSpeed's Azure and DeepCompile tables): the
host waits for a gather before it issues the layer, and NCCL's kernels take multiprocessors from the products."""
PREFETCHED = 0.25
"""The same where a compiler or Megatron-FSDP schedules the exchanges ahead; estimated from DeepCompile's rows."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a setup does not say about a run because its memory does not depend on it."""

    engine: Literal["megatron", "fsdp", "ddp", "deepspeed"]
    code: Code
    precision: ComputePrecision
    linear_layers_only: bool = False
    """Whether only linear layers' products are in it, and those of head and experts in bf16 (torchao). Efficiencies of
    other programs in fp8 were estimated from rows as if every product were."""
    attention: Literal["flash", "flash1", "cudnn", "unfused"] = "flash"
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
    context_exchange: Literal["p2p", "all_gather", "a2a"] = "p2p"
    gradient_bytes: float = 4.0
    """Of a gradient that is reduced over data-parallel ranks."""
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
    """Of the optimizer's moments, per parameter."""
