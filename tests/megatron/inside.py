"""What an engine of Megatron's holds and computes, looked at from inside a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kit.engines.base import StateKind
from kit.specs.model import ModelSpec
from tests.megatron import cases


def held_bytes(rundir: Any) -> dict[str, int]:
    """Inside a worker: what a rank holds after one step."""
    from kit.engines.megatron.engine import MegatronEngine

    engine = MegatronEngine(rundir)
    engine.forward_backward(cases.micro_batches(rundir.plan.model.vocab_size, 0, engine.dp_rank, engine.dp_size))
    engine.apply(cases.LEARNING_RATE)
    held = engine.held_bytes()
    engine.close()
    return held


def logits(rundir: Any) -> torch.Tensor:
    """Inside a worker of a layout without pipeline: (GLOBAL_BATCH_SIZE, SEQ_LENGTH, vocabulary) of the first step."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from kit.engines.megatron.engine import MegatronEngine

    engine = MegatronEngine(rundir)
    inputs, _ = cases.step_batch(rundir.plan.model.vocab_size, 0)
    (chunk,) = engine._chunks
    chunk.eval()
    assert parallel_state.get_pipeline_model_parallel_world_size() == 1
    with torch.no_grad():
        positions = torch.arange(inputs.shape[1]).expand_as(inputs)
        local = chunk(inputs, positions, attention_mask=None, labels=None)
        whole = gather_from_tensor_model_parallel_region(local)[..., : rundir.plan.model.vocab_size].clone()
    engine.close()
    return whole


def hugging_face_logits(spec: ModelSpec, directory: Path) -> torch.Tensor:
    """Logits that transformers computes for the same tokens, with the model saved beside the run directories."""
    attention = "sdpa" if spec.traits.fused_attention else "eager"
    model = AutoModelForCausalLM.from_pretrained(
        directory / cases.HF_DIRECTORY, local_files_only=True, attn_implementation=attention
    )
    with torch.no_grad():
        return model(cases.step_batch(spec.vocab_size, 0)[0], use_cache=False).logits


def kept_bytes(rundir: Any) -> int:
    """Inside a worker: storage that autograd keeps of the layers' forward pass, parameters left out."""
    from kit.engines.megatron.engine import MegatronEngine
    from kit.engines.megatron.engine import _forward_step as forward

    engine = MegatronEngine(rundir)
    (chunk,) = engine._chunks
    parameters = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output, _ = forward(None, iter(cases.micro_batches(rundir.plan.model.vocab_size, 0, 0, 1)), chunk)
        assert output.grad_fn is not None
    engine.close()
    return sum(kept.values())


def rotations(spec: ModelSpec, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inside a worker: angles of the positions of a row, and of given ones."""
    from kit.engines.megatron.model.rope import HfRotaryEmbedding

    rotation = HfRotaryEmbedding(
        spec, torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)
    )
    running = rotation(positions.shape[1])
    rotation.positions = positions
    return running, rotation(positions.shape[1])


def longrope(spec: ModelSpec, length: int) -> bool:
    """Inside a worker: whether this rank rotates by the long factors, its positions a part of a document of this
    length."""
    from kit.engines.megatron.model.rope import HfRotaryEmbedding

    rotation = HfRotaryEmbedding(spec, torch.distributed.group.WORLD)
    rotation.positions = torch.arange(length).chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()][
        None
    ]
    rotation(length)
    return bool(torch.equal(rotation.inv_freq, rotation._long))


def ring_and_whole_attention() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Result and gradients of query, key and value of this rank's part: of ring attention, and of attention to the
    whole sequence; 4 query heads and 2 key/value heads."""
    import torch.distributed as dist

    from kit.engines.kernels.ring_attention import local_part, ring_attention

    group, generator = dist.group.WORLD, torch.Generator().manual_seed(0)
    *inputs, weights = (torch.randn(16, 2, heads, 8, generator=generator) for heads in (4, 2, 2, 4))

    def result_and_gradients(tensors: list[torch.Tensor], weights: torch.Tensor, attend: Any) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        result = attend(*leaves)
        return [result.detach(), *torch.autograd.grad((result * weights).sum(), leaves)]

    def whole(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in tensors)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.permute(2, 0, 1, 3)

    own = [local_part(tensor, 0, group) for tensor in (*inputs, weights)]

    def ring(*parts: torch.Tensor) -> torch.Tensor:
        return ring_attention(*(part.permute(1, 2, 0, 3) for part in parts), group, None).permute(2, 0, 1, 3)

    found = result_and_gradients(own[:3], own[3], ring)
    return found, [local_part(tensor, 0, group) for tensor in result_and_gradients(inputs, weights, whole)]


def dropped_places(rundir: Any) -> torch.Tensor:
    """Inside a worker: the first layer's attention of what is the same on every rank, with dropout."""
    from kit.engines.megatron.engine import MegatronEngine

    engine = MegatronEngine(rundir)
    batches = cases.micro_batches(rundir.plan.model.vocab_size, 0, engine.dp_rank, engine.dp_size)
    assert engine.evaluate(batches) == engine.evaluate(batches), "nothing is dropped in evaluation"
    attention = engine.modules()["decoder.layers.0.self_attention.core_attention"].train()
    tensors = torch.randn(3, 8, 1, 2, 8, generator=torch.Generator().manual_seed(0))
    attended = attention(*tensors, None).detach()
    engine.close()
    return attended


def embedded(rundir: Any) -> torch.Tensor:
    """Inside a worker: what the embedding makes of the first batch, (sequence, batch, hidden)."""
    from kit.engines.megatron.engine import MegatronEngine

    engine = MegatronEngine(rundir)
    inputs, _ = cases.step_batch(rundir.plan.model.vocab_size, 0)
    embedding = next(module for name, module in engine.modules().items() if name.endswith("module.embedding"))
    found = embedding(inputs, torch.arange(inputs.shape[1]).expand_as(inputs)).detach()
    engine.close()
    return found


def memory_told(rundir: Any) -> tuple[float, float]:
    """Inside a worker: GiB of the fullest rank as a summary says it, and those of this one."""
    from kit.engines.megatron.engine import MegatronEngine
    from kit.training.finalize import memory_held_gib

    engine = MegatronEngine(rundir)
    found = memory_held_gib(engine, rundir.plan)[0], sum(engine.held_bytes().values()) / 2**30
    engine.close()
    return found


def counts_of_groups() -> list[int]:
    """Inside a worker: steps that each parameter group has counted, of which one holds nothing on this rank."""
    from kit.engines.megatron.optimizer import Adam

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Adam([{"params": [parameter]}, {"params": [torch.nn.Parameter(torch.empty(0))]}])
    parameter.grad = torch.ones(2)
    optimizer.step()
    return [group["step"] for group in optimizer.param_groups]


def initial_weights(rundir: Any) -> dict[str, torch.Tensor]:
    """Inside a worker: the weights of an engine just built."""
    from kit.engines.megatron.engine import MegatronEngine

    engine = MegatronEngine(rundir)
    weights = cases.export(engine, StateKind.MASTER)
    engine.close()
    return weights


def evaluate(rundir: Any) -> tuple[Any, Any, float]:
    """Inside a worker: evaluate 4 and 3 micro batches, step, and return the next step's loss too."""
    from kit.engines.megatron.engine import MegatronEngine

    vocab_size = rundir.plan.model.vocab_size
    engine = MegatronEngine(rundir)
    batches = cases.micro_batches(vocab_size, 0, engine.dp_rank, engine.dp_size)
    whole, three = engine.evaluate(batches), engine.evaluate(batches[:3])
    engine.forward_backward(batches)
    engine.apply(cases.LEARNING_RATE)
    after_step = engine.forward_backward(cases.micro_batches(vocab_size, 1, engine.dp_rank, engine.dp_size)).mean
    engine.close()
    return whole, three, after_step
