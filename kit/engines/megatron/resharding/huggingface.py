"""Full tensors under Hugging Face names ↔ the shards of this model, one group of tensors at a time.

Import: every rank reads the blocks that are its own, and copies each to its place. Export: each tensor is put
together on one of the ranks that hold a part of it, its owner; owners take turns, so that all ranks write at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import unwrap_model

from kit.engines.base import BlockSource, StateKind, TensorSource
from kit.engines.huggingface.models import check_names, check_shape, tensor_shapes
from kit.engines.megatron.model.transformer_engine import plain_name
from kit.engines.megatron.resharding.buffers import Frozen
from kit.engines.megatron.resharding.groups import Place
from kit.engines.megatron.resharding.p2p import Outbox, receive
from kit.engines.megatron.weights import Group, tensor_groups, weight_map
from kit.engines.megatron.weights.blocks import Block, blocks
from kit.engines.megatron.weights.sharding import Piece, Shape
from kit.specs.model import ModelSpec


class Exchange:
    """The way in and out of one engine's model; every method is collective over all ranks."""

    def __init__(
        self,
        model: ModelSpec,
        config: TransformerConfig,
        chunks: list[torch.nn.Module],
        dense: Place,
        experts: Place,
    ) -> None:
        self.model, self._dense, self._experts = model, dense, experts
        self.groups = list(tensor_groups(weight_map(model), model))
        self._shapes = tensor_shapes(model)
        self.parameters = _global_names(config, chunks)
        self._check_complete()
        self.owners = self._find_owners()
        """Hugging Face name → rank that ``owned`` gives the tensor to, in its order."""

    def load(self, kind: StateKind, source: TensorSource) -> None:
        """Set one kind of state from full tensors, reading this rank's blocks. Raises CheckpointError for others."""
        check_names(self._shapes, source)
        for group in self.groups:
            place = self.place(group)
            mine = [self.parameters[name] for name in (group.megatron, group.copy) if name in self.parameters]
            mine = [param for param in mine if place.state.wants(kind, param)]
            if not mine:
                continue
            blocks = _Blocks(source, group, self._shapes)
            pieces = self.pieces(group, place.tensor.rank())
            for piece in pieces:
                block = blocks.read(piece)
                for param in mine:
                    place.state.put(kind, param, piece.dim, piece.at, block)
            for param in mine:
                _clear_padding(place, kind, param, pieces)

    def owned(self, kind: StateKind) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full fp32 CPU tensor) of what this rank owns. A tensor may be the state itself, and is the caller's
        only until the next one. All ranks must exhaust the iterator.

        What others need of the tensors up to the next own one is on its way before a tensor is given out: they go
        on while the caller writes.
        """
        outbox = Outbox()
        ready: tuple[str, torch.Tensor] | None = None
        for name, assemble in self._steps(kind, outbox):
            if assemble is None:
                continue
            if ready is not None:
                yield ready
                ready = None
            ready = name, assemble().cpu()
        if ready is not None:
            yield ready
        outbox.wait()

    def stream(self, kind: StateKind) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(name, full fp32 CPU tensor on the main rank, None elsewhere); see ``Engine.export_state``."""
        outbox, rank, device = Outbox(), dist.get_rank(), torch.cuda.current_device()
        steps = self._steps(kind, outbox)
        held = {name for group in self.groups if group.megatron in self.parameters for name in group.hugging_face}
        for name, owner in self.owners.items():
            _, assemble = next(steps) if name in held else (name, None)
            tensor: torch.Tensor | None = None
            if assemble is not None:
                tensor = assemble().clone()
                if rank != 0:
                    outbox.send(tensor.view(-1), 0)
                    outbox.wait()
            elif rank == 0:
                tensor = torch.empty(self._shapes[name], dtype=torch.float32, device=device)
                receive(tensor.view(-1), owner)
            yield name, None if tensor is None or rank != 0 else tensor.cpu()
        outbox.wait()

    def _steps(self, kind: StateKind, outbox: Outbox) -> Iterator[tuple[str, Callable[[], torch.Tensor] | None]]:
        """Every tensor that this rank holds a part of: for its owner a function that puts it together, None for the
        others, whose parts are then on their way."""
        for number, group in enumerate(self.groups):
            if group.megatron not in self.parameters:
                continue
            place = self.place(group)
            replica, speaker = turn(number, place)
            if (place.data.rank(), place.tensor.rank()) == (replica, speaker):
                assembly = _Assembly(self, kind, group, outbox)
                for index, name in enumerate(group.hugging_face):
                    yield name, partial(assembly.tensor, index)
                continue
            if group.rule.sharded or place.tensor.rank() == speaker:
                shard = place.state.collect(kind, self.parameters[group.megatron], replica, outbox)
                if shard is not None:
                    self._send(group, shard, place, speaker, outbox)
            for name in group.hugging_face:
                yield name, None

    def _send(self, group: Group, shard: torch.Tensor, place: Place, speaker: int, outbox: Outbox) -> None:
        """Tensor by tensor, as the owner puts them together."""
        to = dist.get_global_rank(place.tensor, speaker)
        for index in range(len(group.hugging_face)):
            for piece in self.pieces(group, place.tensor.rank()):
                if piece.tensor == index and piece.length:
                    outbox.send(shard.narrow(piece.dim, piece.at, piece.length), to)

    def place(self, group: Group) -> Place:
        """Who holds it."""
        place = self._dense if group.expert is None else self._experts
        return replace(place, state=Frozen(place.data)) if group.frozen else place

    def pieces(self, group: Group, rank: int) -> list[Piece]:
        """What a rank of the group's tensor-parallel ranks holds of it."""
        return group.rule.pieces(self.shapes(group), self.model, self.place(group).tensor.size(), rank)

    def blocks(self, group: Group) -> list[Block]:
        """Where this rank's shard of it lies in the whole Megatron parameter."""
        tensor = self.place(group).tensor
        return blocks(group.rule, self.shapes(group), self.model, tensor.size(), tensor.rank())

    def shapes(self, group: Group) -> list[Shape]:
        """Shapes of its Hugging Face tensors."""
        return [self._shapes[name] for name in group.hugging_face]

    def _find_owners(self) -> dict[str, int]:
        mine = []
        for number, group in enumerate(self.groups):
            if group.megatron in self.parameters:
                place = self.place(group)
                if (place.data.rank(), place.tensor.rank()) == turn(number, place):
                    mine += group.hugging_face
        everyone: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        owners = {name: rank for rank, names in enumerate(everyone) for name in names}
        return {name: owners[name] for group in self.groups for name in group.hugging_face}

    def _check_complete(self) -> None:
        mapped = {name for group in self.groups for name in (group.megatron, group.copy)}
        assert not self.parameters.keys() - mapped, sorted(self.parameters.keys() - mapped)
        names = {name for group in self.groups for name in group.hugging_face}
        assert names == self._shapes.keys(), sorted(names ^ self._shapes.keys())


class _Assembly:
    """The tensors of one group on their owner, one after the other."""

    def __init__(self, exchange: Exchange, kind: StateKind, group: Group, outbox: Outbox) -> None:
        self._exchange, self._kind, self._group, self._outbox = exchange, kind, group, outbox
        self._place = exchange.place(group)
        self._shapes = exchange.shapes(group)
        self._mine = exchange.pieces(group, self._place.tensor.rank())
        self._shard: torch.Tensor | None = None

    def tensor(self, index: int) -> torch.Tensor:
        """One full tensor; a view of the shard where that holds it in one piece."""
        full: torch.Tensor | None = None
        if self._shard is None:
            full = self._collect()
        shard = self._shard
        assert shard is not None
        if full is not None:
            self._fill(full, index, None)
            return full
        mine = [piece for piece in self._mine if piece.tensor == index]
        if len(mine) == 1 and mine[0].length == self._shapes[index][mine[0].disk_dim]:
            part = shard.narrow(mine[0].dim, mine[0].at, mine[0].length)
            return (part.t() if mine[0].transposed else part).contiguous()
        full = torch.empty(self._shapes[index], dtype=torch.float32, device=shard.device)
        self._fill(full, index, shard)
        return full

    def _collect(self) -> torch.Tensor | None:
        """This rank's shard; the full tensor too where the shard is one run of its rows, and then inside of it."""
        param = self._exchange.parameters[self._group.megatron]
        full = out = None
        if self._place.state.distributed and len(self._shapes) == len(self._mine) == 1:
            (piece,) = self._mine
            if not piece.transposed and piece.dim == 0 and piece.length == param.shape[0]:
                full = torch.empty(self._shapes[0], dtype=torch.float32, device=param.device)
                out = full.narrow(0, piece.start, piece.length)
        self._shard = self._place.state.collect(self._kind, param, self._place.data.rank(), self._outbox, out)
        return full

    def _fill(self, full: torch.Tensor, index: int, shard: torch.Tensor | None) -> None:
        """Own pieces from ``shard`` (None: they are there), those of the others as they come."""
        group, place = self._group, self._place
        ranks = range(place.tensor.size()) if group.rule.sharded else [place.tensor.rank()]
        for rank in ranks:
            for piece in (each for each in self._exchange.pieces(group, rank) if each.tensor == index):
                target = (full.t() if piece.transposed else full).narrow(piece.dim, piece.start, piece.length)
                if rank == place.tensor.rank():
                    if shard is not None:
                        target.copy_(shard.narrow(piece.dim, piece.at, piece.length))
                elif piece.length:
                    receive(target, dist.get_global_rank(place.tensor, rank))


class _Blocks:
    """Blocks of the tensors of one group; shapes are checked before anything is read."""

    def __init__(self, source: TensorSource, group: Group, shapes: dict[str, Shape]) -> None:
        self._source, self._names = source, group.hugging_face
        self._whole: dict[str, torch.Tensor] = {}
        for name in group.hugging_face:
            if isinstance(source, BlockSource):
                check_shape(name, shapes[name], source.shape(name))
            else:
                self._whole[name] = source.read(name)
                check_shape(name, shapes[name], tuple(self._whole[name].shape))

    def read(self, piece: Piece) -> torch.Tensor:
        """As the shard has it: (output, input)."""
        name = self._names[piece.tensor]
        if name in self._whole:
            block = self._whole[name].narrow(piece.disk_dim, piece.start, piece.length)
        else:
            assert isinstance(self._source, BlockSource)
            block = self._source.read_block(name, piece.disk_dim, piece.start, piece.length)
        return block.t() if piece.transposed else block


def turn(number: int, place: Place) -> tuple[int, int]:
    """(data-parallel rank, tensor-parallel rank) whose turn the group of this number is."""
    return number % place.data.size(), number // place.data.size() % place.tensor.size()


def _clear_padding(place: Place, kind: StateKind, param: torch.nn.Parameter, pieces: Sequence[Piece]) -> None:
    """Rows of the vocabulary that only padding fills."""
    dim = pieces[0].dim
    covered = sum(piece.length for piece in pieces)
    shape = list(place.state.shape(param))
    if missing := shape[dim] - covered:
        shape[dim] = missing
        place.state.put(kind, param, dim, covered, torch.zeros(shape))


def _global_names(config: TransformerConfig, chunks: list[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by name, layers and experts counted over the whole model instead of on this rank."""
    first_expert = 0
    if config.num_moe_experts is not None:
        first_expert = config.num_moe_experts // config.expert_model_parallel_size
        first_expert *= parallel_state.get_expert_model_parallel_rank()
    parameters: dict[str, torch.nn.Parameter] = {}
    for wrapped in chunks:
        chunk = unwrap_model(wrapped)
        offset = get_transformer_layer_offset(config, chunk.vp_stage)
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias"))
        for name, param in chain(chunk.named_parameters(), buffers):
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + offset)
            if "local_experts" in parts:
                place = parts.index("local_experts") + 1
                parts[place] = str(int(parts[place]) + first_expert)
            parameters[plain_name(".".join(parts))] = param
    return parameters
