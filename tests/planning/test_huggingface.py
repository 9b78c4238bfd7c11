"""ModelSpec → transformers → ModelSpec: what its classes save reads back, and they compute with every parameter.

Files that today's transformers does not write, and refusals: specs/test_configs.py.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kit.engines.huggingface.models import hf_config
from kit.specs.catalog import described_names, load_model
from kit.specs.families import Family, families_with
from kit.specs.hf_keys import KEYS
from kit.specs.model import ModelSpec
from tests.support.models import FAMILIES, TWO_STACKS, random_encoder_decoder, random_model

SHAPES = {
    **{name: (load_model(name),) for name in described_names()},
    **{f"random {family}": tuple(random_model(random.Random(seed), family) for seed in range(5))
       for family in FAMILIES},
    **{f"random {family}": tuple(random_encoder_decoder(random.Random(seed), family) for seed in range(5))
       for family in TWO_STACKS},
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_what_transformers_saves_reads_back(name: str, tmp_path: Path) -> None:
    """hf_config writes today's keys (rope_parameters); every field but name and source survives."""
    for model in SHAPES[name]:
        hf_config(model).save_pretrained(tmp_path)
        read = load_model(tmp_path)
        assert dataclasses.replace(read, name=model.name, source=model.source) == model
        assert read.name == tmp_path.name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_with_every_parameter(family: Family) -> None:
    """The class takes the shape, not only counts it: a step's gradients reach each parameter. A key that may have one
    value alone has it in the class as kit builds it."""
    model = random_model(random.Random(1), family)
    config = hf_config(model)
    for key, value in KEYS[family].only.items():
        allowed = value if isinstance(value, tuple) else (value,)
        assert getattr(config, key, allowed[0]) in allowed
    built = AutoModelForCausalLM.from_config(hf_config(_even(model)))
    ids = torch.randint(0, model.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    loss = built(input_ids=ids, labels=ids).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert [name for name, parameter in built.named_parameters() if parameter.grad is None] == []


def _even(model: ModelSpec) -> ModelSpec:
    """torch's grouped products want rows of a multiple of 16 bytes, and every expert gets a token."""
    if model.family not in families_with("num_experts"):
        return model
    widths = {
        "hidden_size": 16 * model.num_attention_heads, "ffn_hidden_size": 32, "moe_ffn_hidden_size": 32,
        **({"head_dim": 16} if model.traits.even_heads else {}),
    }  # fmt: skip
    return dataclasses.replace(model, **widths, experts_per_token=model.num_experts)
