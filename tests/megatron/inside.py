"""What an engine of Megatron's holds and computes, looked at from inside a worker."""

from __future__ import annotations

from typing import Any

import torch

from kit.engines.protocol import StateKind
from kit.specs.model import ModelSpec
from tests.megatron import cases
from tests.support.saved_tensors import saved_bytes, storages


def memory_bytes(engine: Any, rundir: Any) -> dict[str, int]:
    """What a rank holds after one step."""
    engine.forward_backward(cases.batches_of(engine, rundir, 0))
    engine.apply(cases.LEARNING_RATE)
    return engine.memory_bytes()


def kept_bytes(engine: Any, rundir: Any) -> int:
    """Storage that autograd keeps of the layers' forward pass, parameters left out."""
    from kit.engines.megatron.engine import _forward_step as forward

    (chunk,) = engine._chunks
    parameters, batches = storages(chunk.parameters()), iter(cases.batches_of(engine, rundir, 0))
    return saved_bytes(
        lambda: forward(None, batches, chunk)[0], lambda tensor: tensor.untyped_storage().data_ptr() not in parameters
    )


def rotations(spec: ModelSpec, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inside a worker: angles of the positions of a row, and of given ones."""
    from kit.engines.megatron.model.rope import HfRotaryEmbedding

    alone = torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)
    rotation = HfRotaryEmbedding(spec, alone)
    running = rotation(positions.shape[1])
    rotation.positions = positions
    return running, rotation(positions.shape[1])


def longrope(spec: ModelSpec, length: int) -> bool:
    """Inside a worker: whether this rank rotates by the long factors, its positions a part of a document of this
    length."""
    from kit.engines.megatron.model.rope import HfRotaryEmbedding

    rotation, rank = HfRotaryEmbedding(spec, torch.distributed.group.WORLD), torch.distributed.get_rank()
    rotation.positions = torch.arange(length).chunk(torch.distributed.get_world_size())[rank][None]
    rotation(length)
    return bool(torch.equal(rotation.inv_freq, rotation._long))


def dropped_places(engine: Any, rundir: Any) -> torch.Tensor:
    """The first layer's attention of what is the same on every rank, with dropout."""
    batches = cases.batches_of(engine, rundir, 0)
    assert engine.evaluate(batches) == engine.evaluate(batches), "nothing is dropped in evaluation"
    attention = engine.modules()["decoder.layers.0.self_attention.core_attention"].train()
    return attention(*torch.randn(3, 8, 1, 2, 8, generator=torch.Generator().manual_seed(0)), None).detach()


def embedded(engine: Any, rundir: Any) -> torch.Tensor:
    """What the embedding makes of the first batch, (sequence, batch, hidden)."""
    inputs, _ = cases.step_batch(rundir.plan.model.vocab_size, 0)
    embedding = next(module for name, module in engine.modules().items() if name.endswith("module.embedding"))
    return embedding(inputs, torch.arange(inputs.shape[1]).expand_as(inputs)).detach()


def memory_told(engine: Any, rundir: Any) -> tuple[float, float]:
    """GiB of the fullest rank as a summary says it, and those of this one."""
    from kit.training.finalize import memory_held_gib

    return memory_held_gib(engine, rundir.plan)[0], sum(engine.memory_bytes().values()) / 2**30


def counts_of_groups() -> list[int]:
    """Inside a worker: steps that each parameter group has counted, of which one holds nothing on this rank."""
    from kit.engines.megatron.optimizer import Adam

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Adam([{"params": [parameter]}, {"params": [torch.nn.Parameter(torch.empty(0))]}])
    parameter.grad = torch.ones(2)
    optimizer.step()
    return [group["step"] for group in optimizer.param_groups]


def initial_weights(engine: Any, rundir: Any) -> dict[str, torch.Tensor]:
    """The weights of an engine just built."""
    return cases.export(engine, StateKind.MASTER)


def evaluate(engine: Any, rundir: Any) -> tuple[Any, Any, float]:
    """Evaluate 4 and 3 micro batches, step, and return the next step's loss too."""
    batches = cases.batches_of(engine, rundir, 0)
    whole, three = engine.evaluate(batches), engine.evaluate(batches[:3])
    engine.forward_backward(batches)
    engine.apply(cases.LEARNING_RATE)
    return whole, three, engine.forward_backward(cases.batches_of(engine, rundir, 1)).mean
