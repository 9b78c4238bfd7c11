"""The table of model types says what is counted today, and the printed bands hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.tables import model_types
from kit.cost.model.params import count
from kit.specs.catalog import load_model
from kit.specs.catalog.rows import rows
from tests.support.models import FAMILIES

KEPT = json.loads(model_types.RESULTS.read_text(encoding="utf-8"))["types"]
EVERYDAY = ("qwen3_next", "falcon_h1", "exaone_moe", "llama4_text", "nemotron_h", "gemma3n_text", "kimi_linear")


@pytest.mark.everyday(*EVERYDAY)
@pytest.mark.parametrize("name", sorted(KEPT))
def test_the_table_says_what_is_counted_today(name: str) -> None:
    assert model_types.counted_type(name) == KEPT[name]


def test_few_experts_are_active() -> None:
    """The 13B of arXiv 2401.04088, section 2; gpt-oss has biases, and its heads of prediction do not count."""
    assert model_types.active_parameters(load_model("mixtral-8x7b")) == 12_879_925_248
    dense = load_model("llama-3.1-8b")
    assert model_types.active_parameters(dense) == count(dense).total
    oss, sparse = load_model("gpt-oss-20b"), load_model("deepseek-v3")
    expert = 3 * oss.hidden_size * oss.moe_ffn_hidden_size + 2 * oss.moe_ffn_hidden_size + oss.hidden_size
    idle = oss.num_layers * (oss.num_experts - oss.experts_per_token) * expert
    assert model_types.active_parameters(oss) == count(oss).total - idle
    with_head = replace(sparse, mtp_num_layers=1)
    assert model_types.active_parameters(with_head) == model_types.active_parameters(sparse)


@pytest.mark.everyday("llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_described_families_are_within_the_printed_bands(family: str) -> None:
    """One model of the catalog and three small shapes of each family, by both roads."""
    models = [next(model for model in model_types.decoders() if model.family == family)]
    models += [model for model in model_types.tiny() if model.family == family]
    for road, counted in (("counted", True), ("estimated", False)):
        for model in models:
            for quantity, off in model_types.errors(model, counted).items():
                assert off <= rows("approximate")[road][quantity][1], (road, quantity, model)
