"""Parameter counts, equal to the unit to transformers on the meta device."""

from __future__ import annotations

import math
import random

import pytest

from kit.cost.model.params import count, rank_experts, rank_parameters
from kit.engines.huggingface.models import parameter_shapes
from kit.specs.catalog import load_model, model_names
from kit.specs.model import Family, ModelSpec
from tests.support.models import FAMILIES, TWO_STACKS, random_encoder_decoder, random_model

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
    encoder = {name: shape for name, shape in parameter_shapes(model).items() if "encoder." in name}
    of_layers = sum(
        math.prod(shape)
        for name, shape in encoder.items()
        if (".layers." in name or ".block." in name) and "relative_attention_bias" not in name
    )
    assert counts.encoder_layers * counts.encoder_layer.total == of_layers


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3.2-1b", "qwen2.5-7b", "qwen3-8b"])
def test_one_rank_holds_everything_and_pipeline_stages_share_it(name: str) -> None:
    model = load_model(name)
    total = count(model).total
    assert rank_parameters(model, tp=1, pp=1, stage=0) == total
    # With tied embeddings the last stage has its own copy.
    copy = model.vocab_size * model.hidden_size if model.tied_embeddings else 0
    assert sum(rank_parameters(model, tp=1, pp=4, stage=stage) for stage in range(4)) == total + copy


def test_experts_are_shared_out_and_few_of_them_are_active() -> None:
    model = load_model("mixtral-8x7b")
    counts = count(model)
    assert counts.active == 12_879_925_248  # the 13B of arXiv 2401.04088, section 2
    dense = rank_parameters(model, tp=1, pp=1, stage=0)
    assert dense + rank_experts(model, pp=1, ep=1, etp=1) == counts.total
    assert 8 * rank_experts(model, pp=1, ep=4, etp=2) == counts.total - dense


def test_tensor_parallel_ranks_share_matrices_and_repeat_norms() -> None:
    model = load_model("llama-3-8b")
    norms = (2 * model.num_layers + 1) * model.hidden_size
    assert 8 * rank_parameters(model, tp=8, pp=1, stage=0) == count(model).total + 7 * norms
