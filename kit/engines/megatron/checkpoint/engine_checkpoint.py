"""Native checkpoints: megatron-core's torch_dist format, for any layout of the same model.

The checkpoint has every whole parameter and its optimizer state under megatron-core's names, as with the distributed
optimizer's ``fully_reshardable`` (optimizer/distrib_optimizer.py). megatron-core's own writer of that format writes a
corrupt checkpoint if several buckets are padded, and only logs a line. Data-parallel ranks that share a parameter's
state write a part of it each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.engines.megatron.checkpoint import torch_dist
from kit.engines.megatron.checkpoint.names import SAVED, WEIGHT, stored_location
from kit.engines.megatron.checkpoint.torch_dist import ReadBlock, WriteBlock
from kit.engines.megatron.resharding.export import parts
from kit.engines.megatron.resharding.huggingface import HfResharder
from kit.engines.megatron.weights import MappedParam
from kit.engines.megatron.weights.sharding import Block, VocabParallel, whole_shape
from kit.engines.protocol import StateKind, as_matrix
from kit.errors import CheckpointError
from kit.specs.job import OptimizerName


@torch.no_grad()
def snapshot(
    resharder: HfResharder, param_groups: list[dict[str, Any]], copy: bool
) -> Callable[[Path, dist.ProcessGroup | None], None]:
    """Returns a function that writes this rank's part of a checkpoint into a directory, collectively over a group.

    ``copy``: copy the tensors to the host first, so that training can continue while the function runs.
    """
    found = [
        WriteBlock(
            key=where.key,
            shape=where.counts + whole_shape(mapped.sharding, resharder.shapes(mapped), resharder.model),
            offsets=where.index + offsets,
            sizes=(1,) * len(where.index) + tuple(tensor.shape),
            dtype=tensor.dtype,
            read=_on_host(tensor, copy).detach,
        )
        for mapped, kind, offsets, tensor in _own_blocks(resharder)
        for where in [stored_location(mapped.megatron, kind, resharder.model)]
    ]
    torch.cuda.synchronize()  # wait for the copies
    return partial(torch_dist.write_blocks, blocks=found, common=_common(param_groups))


@torch.no_grad()
def load_checkpoint(directory: Path, resharder: HfResharder, optimizer: OptimizerName) -> int:
    """Read a checkpoint of any layout; returns the step count. Raises CheckpointError, maybe on one rank only."""
    checkpoint = torch_dist.Checkpoint(directory)
    if (wrote := checkpoint.optimizer()) != optimizer:
        raise CheckpointError(
            f"{directory} has the state of {wrote}, and this run has optimizer.name={optimizer}; "
            "resume with the optimizer that wrote it, or start from its weights (kit convert model --to hf)"
        )
    steps = checkpoint.optimizer_steps()
    if steps is None:
        raise CheckpointError(
            f"{directory} does not say how many steps its optimizer has made; convert it to an exchange checkpoint or "
            "a Hugging Face model and start from that"
        )
    checkpoint.read(_wanted(resharder))
    return steps


def _own_blocks(resharder: HfResharder) -> Iterator[tuple[MappedParam, str, tuple[int, ...], torch.Tensor]]:
    """(parameter, kind of state, offsets in the whole parameter, tensor) of all blocks that this rank writes."""
    for number, mapped in enumerate(resharder.mapped_params):
        if not resharder.writes(number, mapped):
            continue
        param, state = resharder.parameters[mapped.megatron], resharder.shard_groups(mapped).state
        shape, blocks = state.shape(param), resharder.blocks(mapped)
        for kind in (WEIGHT,) if mapped.frozen else SAVED:
            start, values = state.own(StateKind.MASTER if kind == WEIGHT else StateKind(kind), param)
            if kind == WEIGHT:
                values = param.detach().reshape(-1)[start : start + values.numel()]
            for _, where, part in parts(start, values, shape, blocks):
                yield mapped, kind, where[: len(shape)], part if len(shape) > 1 else part.flatten()


def _wanted(resharder: HfResharder) -> Iterator[ReadBlock]:
    """All blocks that this rank must read."""
    for mapped in resharder.mapped_params:
        state = resharder.shard_groups(mapped).state
        shape = whole_shape(mapped.sharding, resharder.shapes(mapped), resharder.model)
        for param in resharder.held(mapped):
            for kind in (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
                if not state.wants(kind, param):
                    continue
                where = stored_location(mapped.megatron, WEIGHT if mapped.frozen else kind, resharder.model)
                leading = len(where.index)
                for block in resharder.blocks(mapped):
                    offsets, sizes = [0] * len(shape), list(shape)
                    offsets[block.dim], sizes[block.dim] = block.start, block.length
                    yield ReadBlock(
                        key=where.key,
                        shape=where.counts + shape,
                        offsets=where.index + tuple(offsets),
                        sizes=(1,) * leading + tuple(sizes),
                        take=partial(_put, partial(state.put, kind, param), block, leading),
                        padded=leading if isinstance(mapped.sharding, VocabParallel) else None,
                    )


def _put(put: Callable[..., None], block: Block, leading: int, offsets: tuple[int, ...], part: torch.Tensor) -> None:
    row, column, *_ = (*offsets[leading:], 0)
    first_row, first_column = block.corner
    put(first_row + row, first_column + column, as_matrix(part.reshape(part.shape[leading:])))


def _common(param_groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Content of ``common.pt``, with megatron.training's names and the sharding type of the distributed optimizer."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in param_groups]
    return {
        "checkpoint_version": 3.0,
        "optimizer": {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"},
        "content_metadata": {
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
    }


def _on_host(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    """``tensor`` on the host. ``copy``: a page-locked copy; the GPU may still copy when this returns."""
    if not copy:
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
