"""Parameter counts, equal to the unit to transformers on the meta device."""

from __future__ import annotations

import math
import random

import pytest

from kit.cost.model.params import count
from kit.specs.catalog import load_model, model_names
from kit.specs.families import Family
from kit.specs.model import ModelSpec
from tests.support.models import FAMILIES, TWO_STACKS, random_encoder_decoder, random_model
from tests.support.parameter_shapes import parameter_shapes

WORDS = {
    "relative": ("relative_attention_bias",),  # in the first layer of a stack, for all of them
    "layers": (".layers.", ".h.", ".block."),
    "head": ("lm_head", "embed_out"),
    "embedding": ("embed", "wte", "wpe", "shared"),
    "final_norm": ("",),
}
"""Part → what is in the names of its parameters; the first that fits."""


def real_parts(model: ModelSpec) -> dict[str, int]:
    """transformers' own parameters, by part."""
    parts = dict.fromkeys(WORDS, 0)
    for name, shape in parameter_shapes(model).items():
        part = next(part for part, words in WORDS.items() if any(word in name for word in words))
        parts[part] += math.prod(shape)
    parts["embedding"] += parts.pop("relative")
    return parts


def counted_parts(model: ModelSpec) -> dict[str, int]:
    counts = count(model)
    return {part: getattr(counts, part) for part in ("embedding", "layers", "final_norm", "head")}


@pytest.mark.slow
@pytest.mark.everyday(*model_names()[::12])
@pytest.mark.parametrize("name", model_names())
def test_catalog_models(name: str) -> None:
    model = load_model(name)
    if model.approximate is not None:  # of which the whole alone is exact
        assert count(model).total == sum(real_parts(model).values())
    else:
        assert counted_parts(model) == real_parts(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_shapes(family: Family) -> None:
    """25 of each family of one stack."""
    for seed in range(25):
        model = random_model(random.Random(seed), family)
        assert counted_parts(model) == real_parts(model), model


@pytest.mark.parametrize("family", TWO_STACKS)
@pytest.mark.parametrize("seed", range(6))
def test_two_stacks_are_counted_to_the_unit(family: Family, seed: int) -> None:
    model = random_encoder_decoder(random.Random(seed), family)
    counts = count(model)
    assert counted_parts(model) == real_parts(model)
    assert counts.encoder_layers * counts.encoder_layer.total == sum(
        math.prod(shape)
        for name, shape in parameter_shapes(model).items()
        if "encoder." in name and any(word in name for word in WORDS["layers"]) and WORDS["relative"][0] not in name
    )
