"""Adds LoRA's adapters to Megatron's layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from kit.engines.megatron.model.adapted_linear import ADAPTABLE, Adapter
from kit.engines.megatron.resharding.huggingface import global_names
from kit.engines.megatron.weights.adapters import adapted_weights
from kit.engines.megatron.weights.sharding import Shape
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec


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
    for name, _, of_b in adapted_weights(model, shapes):
        if name not in weights:
            continue
        linear = linears[weights[name]]
        of_tensor = torch.zeros(len(linear.weight), len(of_b.hugging_face))
        for piece in of_b.sharding.slices([shapes[each] for each in of_b.hugging_face], model, tp, rank):
            of_tensor[piece.at : piece.at + piece.length, piece.tensor] = 1
        linear.adapter = Adapter(linear, config, of_tensor, lora.rank, lora.scale_of(""))
