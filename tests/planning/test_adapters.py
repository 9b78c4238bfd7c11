"""LoRA's parameters as they are counted, beside those that peft makes of transformers' models."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kit.cost.model.lora import adapter_parameters_of, named_layers
from kit.engines.huggingface.adapters import adapter_shapes
from kit.specs.catalog import load_model
from kit.specs.job import LoraSpec

MODELS = (
    "llama-3.2-1b",
    "qwen2.5-1.5b",
    "qwen3-1.7b",
    "gemma-2-2b",
    "phi-3-mini-4k",
    "gpt2-xl",
    "pythia-2.8b",
    "bloom-1b7",
    "falcon-7b",
    "opt-6.7b",
    "starcoder2-3b",
    "olmo-2-7b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "qwen1.5-moe-a2.7b",
    "deepseek-v3",
    "deepseek-v2-lite",
    "glm-4.5-air",
)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("targets", ["attention", "all-linear"])
@pytest.mark.parametrize("name", MODELS)
def test_as_many_as_peft_makes(name: str, targets: str, dora: bool) -> None:
    model = replace(load_model(name), num_layers=2)
    lora = LoraSpec(rank=8, targets=targets, use_dora=dora)  # type: ignore[arg-type]
    assert adapter_parameters_of(model, lora) == sum(math.prod(shape) for shape in adapter_shapes(model, lora).values())


@pytest.mark.parametrize("name", [name for name in MODELS if named_layers(load_model(name))])
def test_listed_layers_get_as_many_as_peft_makes(name: str) -> None:
    """Each layer alone, with a rank of its own."""
    model = replace(load_model(name), num_layers=2)
    for layer in named_layers(model):
        lora = LoraSpec(rank=8, target_modules=(layer,), rank_pattern={layer: 5})
        shapes = adapter_shapes(model, lora)
        assert all(f".{layer}.lora_" in each for each in shapes)
        assert adapter_parameters_of(model, lora) == sum(map(math.prod, shapes.values())), layer
        assert (
            adapter_parameters_of(model, replace(lora, rank_pattern={})) == adapter_parameters_of(model, lora) * 8 / 5
        )
