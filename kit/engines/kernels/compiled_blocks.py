"""Compiles transformer blocks one by one with torch.compile: equal blocks share one compiled graph.

A whole model would be traced again for every change around it (a mask, a length, an evaluation), and its graph would
grow with the number of layers. Modules and parameter names do not change.
"""

from __future__ import annotations

import importlib.util

import torch
from torch.nn.attention import SDPBackend, activate_flash_attention_impl

from kit.engines.huggingface.models import transformer_layers
from kit.errors import EngineError
from kit.specs.layout import AttentionKernel

BACKEND = "inductor"
"""Backend of torch.compile: generates Triton kernels for GPUs and C++ for CPUs."""


def compile_layers(model: torch.nn.Module) -> int:
    """Compile every block on its first call; returns the number of blocks. Raises EngineError if there is none.

    Recompute and hooks of a block stay outside of its compiled graph, so FSDP2 gathers and frees the weights as before.
    A second sequence length compiles once more, for any length.
    """
    if next(model.parameters()).is_cuda and importlib.util.find_spec("triton") is None:
        raise EngineError(
            "compile_layers=true and Triton is not installed, which makes kernels for GPUs; pip install triton "
            "(torch's CUDA wheels bring it), or use compile_layers=false"
        )
    layers = transformer_layers(model)
    if not layers:
        raise EngineError(f"compile_layers=true with {type(model).__name__}, which has no blocks that repeat")
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=BACKEND)
    return len(layers)


def choose_attention(kernel: AttentionKernel) -> None:
    """Make torch prefer cuDNN's attention in this process, or run FlashAttention 3 or 4 where it would run
    FlashAttention-2. torch uses the next kernel for inputs that cuDNN does not support. Raises EngineError for a
    FlashAttention that is not installed."""
    if kernel in ("flash3", "flash4"):
        try:
            activate_flash_attention_impl(f"FA{kernel[-1]}")
        except (ImportError, RuntimeError) as error:
            raise EngineError(
                f"attention_kernel={kernel}: {error}; install FlashAttention {kernel[-1]}, or use default or cudnn"
            ) from None
    if kernel != "cudnn":
        return
    order = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    torch._C._set_sdp_priority_order([int(backend) for backend in order])  # type: ignore[call-overload]
