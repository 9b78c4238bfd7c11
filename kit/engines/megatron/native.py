"""Native checkpoints: megatron-core's torch_dist format, for the same layout.

The distributed optimizer is saved as ``dp_reshardable``: each rank writes its own parts of each bucket, and nothing is
gathered. Its other format, ``fully_reshardable``, writes a corrupt checkpoint where several buckets are padded,
with nothing but a line in the log (optimizer/distrib_optimizer.py, "param range exceeds unpadded buffer"). Changes
of layout go through the hub checkpoint instead.

``dist_checkpointing.save`` spawns a Manager process: a script that calls it guards its top level with
``if __name__ == "__main__"``. Here that process ends with the save; megatron-core would keep it, and a killed rank
would leave it behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.utils import unwrap_model

from kit.errors import CheckpointError


def save(directory: Path, chunks: list[torch.nn.Module], optimizer: ChainedOptimizer) -> None:
    """Write model and optimizer into an existing empty directory that all ranks see. Raises CheckpointError."""
    try:
        dist_checkpointing.save(_sharded(chunks, optimizer, is_loading=False), str(directory))
    except (CheckpointingException, OSError, RuntimeError) as error:
        raise CheckpointError(f"{directory} could not be written by megatron-core: {error}") from error
    finally:
        filesystem_async._results_queue = None  # the last reference to its Manager


@torch.no_grad()
def load(directory: Path, chunks: list[torch.nn.Module], optimizer: ChainedOptimizer) -> None:
    """Read what ``save`` wrote with the same layout. Raises CheckpointError.

    Without ``no_grad`` the distributed optimizer fails on its fp32 parts, which are views of parameters.
    """
    try:
        state = dist_checkpointing.load(_sharded(chunks, optimizer, is_loading=True), str(directory))
    except (CheckpointingException, OSError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"{directory} cannot be read by megatron-core ({error}); "
            f"native checkpoints need the layout that wrote them: use the hub checkpoint for another"
        ) from error
    for name, chunk in _named(chunks):
        unwrap_model(chunk).load_state_dict(state[name])
    optimizer.load_state_dict(state["optimizer"])


def _sharded(chunks: list[torch.nn.Module], optimizer: ChainedOptimizer, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = {name: unwrap_model(chunk).sharded_state_dict(metadata=metadata) for name, chunk in _named(chunks)}
    # The optimizer finds its parameters in the model's part by identity, in one flat mapping.
    flat = model if len(chunks) > 1 else model["model"]
    return {**model, "optimizer": optimizer.sharded_state_dict(flat, is_loading=is_loading, metadata=metadata)}


def _named(chunks: list[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """megatron.training's names: ``model``, or ``model0``, ``model1``, … for virtual pipeline stages."""
    if len(chunks) == 1:
        return [("model", chunks[0])]
    return [(f"model{index}", chunk) for index, chunk in enumerate(chunks)]
