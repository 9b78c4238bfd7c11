"""Mappings of LoRA's adapters, which follow from those of the weights.

Experts get no adapters, as on the other engines: transformers stores them in one fused tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kit.engines.huggingface.adapters import PREFIX
from kit.engines.megatron.weights.families import weight_map
from kit.engines.megatron.weights.mapping import ParamMapping, mapped_params
from kit.engines.megatron.weights.sharding import Replicated, RowParallel, Shape, Transposed
from kit.specs.model import ModelSpec


def adapter_params(model: ModelSpec, shapes: Mapping[str, Shape]) -> list[ParamMapping]:
    """Every A and B of the whole model. ``shapes``: names on disk → shapes of all adapters."""
    return [each for _, *both in adapted_weights(model, shapes) for each in both]


def adapted_weights(model: ModelSpec, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, ParamMapping, ParamMapping]]:
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
        yield mapped.megatron, ParamMapping(f"{adapter}.a", names_a, of_a), ParamMapping(f"{adapter}.b", names_b, of_b)
