"""The table of model types says what is counted today, and the printed bands hold."""

from __future__ import annotations

import json

import pytest

from benchmarks.tables import model_types
from kit.specs.catalog.rows import rows
from tests.support.models import FAMILIES

KEPT = json.loads(model_types.RESULTS.read_text(encoding="utf-8"))["types"]
EVERYDAY = ("qwen3_next", "falcon_h1", "exaone_moe", "llama4_text", "nemotron_h", "gemma3n_text", "kimi_linear")


@pytest.mark.everyday(*EVERYDAY)
@pytest.mark.parametrize("name", sorted(KEPT))
def test_the_table_says_what_is_counted_today(name: str) -> None:
    assert model_types.counted_type(name) == KEPT[name]


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
