"""torch.compile of transformer blocks, one by one: all of them run one compiled block, and nothing larger is traced.

A whole model is traced again for every change around it (a mask, a length, an evaluation), and its graph grows with its
layers; a block is the part that repeats. The modules and their parameters' names stay what they are.
"""

from __future__ import annotations

import importlib.util

import torch
from torch.nn.attention import SDPBackend

from kit.engines.huggingface.models import transformer_layers
from kit.errors import EngineError

BACKEND = "inductor"
"""What makes kernels of graphs: Triton's for GPUs, C++ for CPUs."""


def compile_layers(model: torch.nn.Module) -> int:
    """Compile every block when it is first called; returns how many there are. Raises EngineError where none is found.

    Where recompute is on it stays around the compiled block, and so do hooks of the block itself: FSDP2 gathers and
    frees a block's weights outside of what is traced. Lengths that change are compiled once more, for any.
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


def prefer_cudnn() -> None:
    """Ask cuDNN's attention before FlashAttention-2, for this process; what it cannot compute goes to the next."""
    order = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    torch._C._set_sdp_priority_order([int(backend) for backend in order])  # type: ignore[call-overload]
