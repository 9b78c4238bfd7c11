"""torch.compile of transformer blocks, one by one: all of them run one compiled block, and nothing larger is traced.

A whole model is traced again for every change around it (a mask, a length, an evaluation), and its graph grows with its
layers; a block is the part that repeats. The modules and their parameters' names stay what they are.
"""

from __future__ import annotations

import torch

from kit.engines.hf import transformer_layers
from kit.errors import EngineError


def compile_layers(model: torch.nn.Module, backend: str = "inductor") -> int:
    """Compile every block when it is first called; returns how many there are. Raises EngineError where none is found.

    Where recompute is on it stays around the compiled block. Lengths that change are compiled once more, for any.
    """
    layers = transformer_layers(model)
    if not layers:
        raise EngineError(f"compile_layers=true with {type(model).__name__}, which has no blocks that repeat")
    for layer in layers:
        layer.compile(backend=backend)
    return len(layers)
