"""A bare size → a shape near it that parallelism can divide."""

from __future__ import annotations

import math

import pytest

from kit.cost.model.params import count
from kit.errors import SpecError
from kit.planner.request import Request
from kit.report.memory_report import memory_report
from kit.report.memory_text import picture
from kit.specs.catalog import load_model
from tests.support.models import cluster, job
from tests.support.refusals import refusal

UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}
SWEEP = [f"{10 ** (exponent / 8):.4g}M" for exponent in range(math.ceil(8 * math.log10(20)), 8 * 7)]
KNOWN = ["350M", "1.3B", "7B", "13b", "34B", "70B", "175B", "1T"]


@pytest.mark.parametrize("word", [word for word in [*SWEEP, *KNOWN] if "e" not in word])
def test_near_the_size_and_divisible(word: str) -> None:
    model = load_model(word)
    wanted = float(word[:-1]) * UNITS[word[-1].upper()]
    assert abs(count(model).total / wanted - 1) <= 0.03
    assert model.hidden_size % 128 == model.ffn_hidden_size % 128 == model.num_layers % 2 == 0
    assert model.head_dim == (64 if wanted < 1e9 else 128)
    assert model.num_attention_heads * model.head_dim == model.hidden_size
    assert model.num_key_value_heads == (8 if wanted >= 30e9 else model.num_attention_heads)
    assert 2 <= model.ffn_hidden_size / model.hidden_size <= 5
    if wanted >= 5e9:
        assert model.num_attention_heads % 8 == model.num_layers % 4 == 0


def test_sizes_that_published_models_have_become_like_them() -> None:
    """Llama 13B is 40 layers of 5120 with 13,824 (arXiv 2302.13971, table 2); Llama 2 70B is 80 of 8192."""
    assert [(load_model("13B").num_layers, load_model("13B").hidden_size, load_model("13B").ffn_hidden_size)] == [
        (40, 5120, 13824)
    ]
    assert (load_model("70B").num_layers, load_model("70B").hidden_size) == (80, 8192)


def test_the_shape_is_said() -> None:
    report = memory_report(Request(model=load_model("13B"), cluster=cluster("8xH100"), job=job()))
    assert "made for the size 13B: a Llama of 40 layers, hidden size 5120" in picture(report).plain


@pytest.mark.parametrize("word", ["0B", "1M", "500T"])
def test_sizes_without_a_sensible_shape(word: str) -> None:
    assert "not between 20M and 20T" in refusal(SpecError, load_model, word)
