"""Gathers an engine's full tensors on rank 0, to compare small models."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from kit.engines.protocol import Engine, StateKind, TensorShard, place


def full_tensors(engine: Engine, kind: StateKind) -> dict[str, torch.Tensor]:
    """Collective. Hugging Face name → full fp32 CPU tensor of one kind of state, on rank 0; empty on other ranks."""
    blocks = engine.export_blocks([kind])
    own = [replace(block, values=block.values.to("cpu", torch.float32, copy=True)) for block in blocks]
    gathered: list[list[TensorShard]] = [[] for _ in range(dist.get_world_size())]
    dist.gather_object(own, gathered if dist.get_rank() == 0 else None)
    found: dict[str, torch.Tensor] = {}
    for block in (block for blocks in gathered for block in blocks):
        tensor = found.setdefault(block.name, torch.empty(block.shape))
        place(tensor, block.row, block.column, block.values)
    exported = sum(block.values.numel() for blocks in gathered for block in blocks)
    assert exported == sum(tensor.numel() for tensor in found.values()), "every element once"
    return found if dist.get_rank() == 0 else {}
