"""Native checkpoints: megatron-core's torch_dist format, for any layout of the same model.

Every parameter is stored whole, under megatron-core's name, with its optimizer state: what ``fully_reshardable`` of
the distributed optimizer means (optimizer/distrib_optimizer.py), which itself writes a corrupt checkpoint where
several buckets are padded, with nothing but a line in the log. Each rank writes blocks of about as many parameters;
data-parallel ranks that share a parameter's state send it to the one whose turn it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.engines.base import StateKind
from kit.engines.megatron.checkpoint import torch_dist
from kit.engines.megatron.checkpoint.names import SAVED, WEIGHT, stored
from kit.engines.megatron.checkpoint.torch_dist import ReadBlock, WriteBlock
from kit.engines.megatron.resharding.huggingface import Exchange, turn
from kit.engines.megatron.resharding.optimizer_state import LocalState
from kit.engines.megatron.resharding.p2p import P2PSender
from kit.engines.megatron.weights import Group
from kit.engines.megatron.weights.blocks import Block, whole_shape
from kit.engines.megatron.weights.sharding import Vocabulary
from kit.errors import CheckpointError


@dataclass(frozen=True)
class Snapshot:
    """What this rank writes of a checkpoint."""

    blocks: list[WriteBlock]
    common: dict[str, Any]

    def write(self, directory: Path, group: dist.ProcessGroup | None = None) -> None:
        """Collective over ``group``; see ``torch_dist.write``."""
        torch_dist.write(directory, self.blocks, self.common, group)


@torch.no_grad()
def snapshot(exchange: Exchange, param_groups: list[dict[str, Any]], copy: bool) -> Snapshot:
    """Collective. ``copy``: on the host and apart from the live state, so that training can go on at once."""
    sender = P2PSender()
    keep = _Keeper(copy)
    found = [
        WriteBlock(
            key=where.key,
            shape=where.counts + whole_shape(group.rule, exchange.shapes(group), exchange.model),
            offsets=where.index + offsets,
            sizes=(1,) * len(where.index) + tuple(tensor.shape),
            dtype=tensor.dtype,
            read=partial(_itself, keep(tensor)),
        )
        for group, kind, offsets, tensor in _own_blocks(exchange, sender)
        for where in [stored(group.megatron, kind, exchange.model)]
    ]
    sender.wait()
    keep.finish()
    return Snapshot(found, _common(param_groups))


@torch.no_grad()
def load(directory: Path, exchange: Exchange) -> int:
    """Collective. Read what ``snapshot`` wrote on any layout; returns Adam's step count. Raises CheckpointError."""
    problem = steps = None
    try:
        checkpoint = torch_dist.Checkpoint(directory)
        steps = checkpoint.optimizer_steps()
        if steps is None:
            raise CheckpointError(
                f"{directory} does not say how many steps its optimizer has made; convert it to an exchange "
                "checkpoint or a Hugging Face model and start from that"
            )
        checkpoint.read(_wanted(exchange))
    except CheckpointError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for each in problems:
        if each is not None:
            raise CheckpointError(each)
    assert steps is not None
    return steps


def _own_blocks(exchange: Exchange, sender: P2PSender) -> Iterator[tuple[Group, str, tuple[int, ...], torch.Tensor]]:
    """(group, kind, offsets in the whole parameter, tensor) of what is this rank's turn to write."""
    for number, group in enumerate(exchange.groups):
        param = exchange.parameters.get(group.megatron)
        if param is None:
            continue
        place = exchange.place(group)
        replica, speaker = turn(number, place)
        if not group.rule.sharded and place.tensor.rank() != speaker:
            continue
        for kind in (WEIGHT,) if group.frozen else SAVED:
            if kind == WEIGHT:
                whole = param.detach() if place.data.rank() == replica else None
            else:
                assert isinstance(place.state, LocalState)
                whole = place.state.collect(StateKind(kind), param, replica, sender)
            if whole is None:
                continue
            for block in exchange.blocks(group):
                offsets = [0] * whole.ndim
                offsets[block.dim] = block.start
                yield group, kind, tuple(offsets), whole.narrow(block.dim, block.at, block.length)


def _wanted(exchange: Exchange) -> Iterator[ReadBlock]:
    """Every block that this rank keeps anything of."""
    for group in exchange.groups:
        state = exchange.place(group).state
        shape = whole_shape(group.rule, exchange.shapes(group), exchange.model)
        params = [exchange.parameters[name] for name in (group.megatron, group.copy) if name in exchange.parameters]
        for param in params:
            for kind in (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
                if not state.wants(kind, param):
                    continue
                where = stored(group.megatron, WEIGHT if group.frozen else kind, exchange.model)
                leading = len(where.index)
                for block in exchange.blocks(group):
                    offsets, sizes = [0] * len(shape), list(shape)
                    offsets[block.dim], sizes[block.dim] = block.start, block.length
                    yield ReadBlock(
                        key=where.key,
                        shape=where.counts + shape,
                        offsets=where.index + tuple(offsets),
                        sizes=(1,) * leading + tuple(sizes),
                        take=partial(_put, partial(state.put, kind, param), block, leading),
                        padded=leading if isinstance(group.rule, Vocabulary) else None,
                    )


def _put(put: Callable[..., None], block: Block, leading: int, offsets: tuple[int, ...], part: torch.Tensor) -> None:
    """A part reaches over all of the other dimension: no layout cuts a parameter along two."""
    inside = offsets[leading:]
    assert all(offset == 0 for dim, offset in enumerate(inside) if dim != block.dim)
    put(block.dim, block.at + inside[block.dim], part.reshape(part.shape[leading:]))


def _common(param_groups: list[dict[str, Any]]) -> dict[str, Any]:
    """As megatron.training names it, with the type that tells the distributed optimizer what its state looks like."""
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


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Keeper:
    """Tensors for a checkpoint: the live ones, or copies in host memory that a GPU copies to by itself."""

    def __init__(self, copy: bool) -> None:
        self._copy = copy

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._copy:
            return tensor.cpu()
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return kept.copy_(tensor, non_blocking=True)

    def finish(self) -> None:
        torch.cuda.synchronize()
