"""LoRA on Megatron's layers: which layers get adapters, and what these are called in peft, by the weight maps.

Experts get no adapters, as on the other engines: transformers stores them in one fused tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from kit.engines.huggingface.adapters import PREFIX
from kit.engines.megatron.model.adapted_linear import ADAPTABLE, Adapter
from kit.engines.megatron.resharding.huggingface import global_names
from kit.engines.megatron.weights import MappedParam, mapped_params, weight_map
from kit.engines.megatron.weights.sharding import Replicated, RowParallel, Shape, Transposed
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec


def adapter_params(model: ModelSpec, shapes: Mapping[str, Shape]) -> list[MappedParam]:
    """Every A and B of the whole model. ``shapes``: names on disk → shapes of all adapters."""
    return [each for _, *both in _adapted(model, shapes) for each in both]


def _adapted(model: ModelSpec, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, MappedParam, MappedParam]]:
    """(Megatron name of an adapted weight, its A, its B). peft's A is (rank, input) and B (output, rank), whatever the
    layout of the weight on disk."""
    for mapped in mapped_params(weight_map(model), model):
        stems = [PREFIX + name.removesuffix(".weight") for name in mapped.hugging_face]
        if mapped.expert is not None or f"{stems[0]}.lora_A.weight" not in shapes:
            continue
        rule = mapped.sharding.sharding if isinstance(mapped.sharding, Transposed) else mapped.sharding
        of_a, of_b = (rule, Replicated()) if isinstance(rule, RowParallel) else (Replicated(), rule)
        adapter = mapped.megatron.removesuffix("weight") + "adapter"
        names_a, names_b = (tuple(f"{stem}.lora_{part}.weight" for stem in stems) for part in "AB")
        yield mapped.megatron, MappedParam(f"{adapter}.a", names_a, of_a), MappedParam(f"{adapter}.b", names_b, of_b)


def add_adapters(
    chunks: list[torch.nn.Module],
    config: TransformerConfig,
    model: ModelSpec,
    lora: LoraSpec,
    shapes: Mapping[str, Shape],
) -> None:
    """Freeze the model and add adapters, whose weights are not set, in place. ``chunks``: this rank's model chunks,
    before they are wrapped for data parallelism."""
    for chunk in chunks:
        chunk.requires_grad_(False)
        if config.recompute_granularity == "full" and (bare := unwrap_model(chunk)).pre_process:
            # Recomputed layers have gradients only if their input has one (tensor_parallel/random.py).
            bare.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
    weights = global_names(config, chunks)
    linears = {m.weight: m for chunk in chunks for m in chunk.modules() if isinstance(m, ADAPTABLE)}
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    for name, _, of_b in _adapted(model, shapes):
        if name not in weights:
            continue
        linear = linears[weights[name]]
        of_tensor = torch.zeros(len(linear.weight), len(of_b.hugging_face))
        for piece in of_b.sharding.slices([shapes[each] for each in of_b.hugging_face], model, tp, rank):
            of_tensor[piece.at : piece.at + piece.length, piece.tensor] = 1
        linear.adapter = Adapter(linear, config, of_tensor, lora.rank, lora.alpha / lora.rank)
