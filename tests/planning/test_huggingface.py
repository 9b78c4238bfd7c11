"""config.json → ModelSpec, and back by transformers."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kit.engines.huggingface.models import hf_config
from kit.errors import SpecError
from kit.specs.catalog import described_names, load_model
from kit.specs.families import WITH_EXPERTS
from kit.specs.hf_keys import KEYS
from kit.specs.huggingface import model_from_config
from tests.support.models import FAMILIES, TWO_STACKS, random_encoder_decoder, random_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 128,
    "n_positions": 64,
}


@pytest.mark.parametrize("name", described_names())
def test_what_transformers_saves_reads_back(name: str, tmp_path: Path) -> None:
    """hf_config writes today's keys (rope_parameters); every field but name and source survives."""
    model = load_model(name)
    hf_config(model).save_pretrained(tmp_path)
    read = load_model(tmp_path)
    assert _shape(read) == _shape(model)
    assert read.name == tmp_path.name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(5))
def test_random_shapes_read_back(family: Any, seed: int, tmp_path: Path) -> None:
    model = random_model(random.Random(seed), family)
    hf_config(model).save_pretrained(tmp_path)
    assert _shape(load_model(tmp_path)) == _shape(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_fixed_keys_are_what_the_class_does(family: Any) -> None:
    """A key that may have one value alone has it in the class as kit builds it."""
    config = hf_config(random_model(random.Random(3), family))
    for key, value in KEYS[family].only.items():
        allowed = value if isinstance(value, tuple) else (value,)
        assert getattr(config, key, allowed[0]) in allowed


@pytest.mark.parametrize("family", TWO_STACKS)
@pytest.mark.parametrize("seed", range(5))
def test_two_stacks_read_back(family: Any, seed: int, tmp_path: Path) -> None:
    model = random_encoder_decoder(random.Random(seed), family)
    hf_config(model).save_pretrained(tmp_path)
    assert _shape(load_model(tmp_path)) == _shape(model)


def test_stacks_of_two_widths_are_refused() -> None:
    config = {"model_type": "bart", "encoder_ffn_dim": 64, "decoder_ffn_dim": 32, "d_model": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    with pytest.raises(SpecError, match="encoder_ffn_dim=64 and decoder_ffn_dim=32"):
        model_from_config({**config, **heads}, "b", "config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_with_every_parameter(family: Any) -> None:
    """The class takes the shape, not only counts it: a step's gradients reach each parameter."""
    model = random_model(random.Random(1), family)
    if family in WITH_EXPERTS:  # torch's grouped products want rows of a multiple of 16 bytes
        widths = {"hidden_size": 16 * model.num_attention_heads, "ffn_hidden_size": 32, "moe_ffn_hidden_size": 32}
        widths |= {"head_dim": 16} if model.traits.even_heads else {}
        model = dataclasses.replace(model, **widths, experts_per_token=model.num_experts)
    built = AutoModelForCausalLM.from_config(hf_config(model))
    ids = torch.randint(0, model.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    loss = built(input_ids=ids, labels=ids).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert [name for name, parameter in built.named_parameters() if parameter.grad is None] == []


def test_defaults_where_an_old_file_is_silent() -> None:
    model = model_from_config(LLAMA, "old", "config.json")
    assert (model.num_key_value_heads, model.head_dim, model.rope_theta) == (4, 16, 10000.0)
    assert (model.tied_embeddings, model.norm_eps, model.rope_scaling) == (False, 1e-6, None)
    gpt2 = model_from_config(GPT2, "old", "config.json")
    assert (gpt2.ffn_hidden_size, gpt2.tied_embeddings, gpt2.rope_theta) == (256, True, None)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_keys_of_all_ages(key: str) -> None:
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {key: "linear", "factor": 2.0}}
    new = {**LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    for config in (old, new):
        model = model_from_config(config, "m", "config.json")
        assert model.rope_theta == 5e5
        assert model.rope_scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("given", "window"), [({"sliding_window": None}, None), ({"sliding_window": 99}, 99), ({}, 4096)]
)
def test_mistral_and_its_window(given: dict[str, Any], window: int | None) -> None:
    model = model_from_config({**LLAMA, "model_type": "mistral", **given}, "m", "config.json")
    assert (model.family, model.sliding_window) == ("mistral", window)


def test_phi3_as_old_and_new_transformers_write_it() -> None:
    old = {**LLAMA, "model_type": "phi3", "sliding_window": 2047, "rope_theta": 1e4, "rope_scaling": None}
    new = {**old, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
    for config in (old, new):
        model = model_from_config(config, "m", "config.json")
        assert (model.family, model.sliding_window, model.rope_scaling) == ("phi3", 2047, None)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": 64}, "model_type=None.* supported are llama, mistral, .* own needs name, family, num_"),
        ({**LLAMA, "model_type": "phi3", "rope_scaling": 8}, "rope_scaling=8 of"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "'x', which is no number"),
        ({**LLAMA, "rope_scaling": {"rope_type": "longrope", "long_factor": [1.0, None]}}, "None, which is no number"),
        ({**LLAMA, "layer_types": "full"}, "layer_types='full' of .* is no list"),
        ({**LLAMA, "layer_types": [1, 2]}, r"layer_types=\[1, 2\] of .* is no list"),
        ({**LLAMA, "model_type": "phi3", "partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        ({**LLAMA, "model_type": "gpt_neox", "hidden_act": "relu"}, "hidden_act='relu'"),
        (
            {**LLAMA, "model_type": "gemma2", "layer_types": ["full_attention", "sliding_attention"]},
            "the pattern known",
        ),
        (
            {**LLAMA, "model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False},
            "new_decoder_architecture=True",
        ),
        ({**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, "sliding_window=4096"),
        ({**LLAMA, "model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        (
            {**LLAMA, "model_type": "mixtral", "num_local_experts": 1},
            "experts_per_token=2 of .* more than num_experts=1",
        ),
        ({**LLAMA, "attention_bias": True}, "attention_bias=True"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({**GPT2, "activation_function": "relu"}, "activation_function='relu'"),
        ({key: value for key, value in LLAMA.items() if key != "vocab_size"}, "lacks vocab_size"),
        ({**LLAMA, "num_attention_heads": 5}, "5 attention heads do not divide"),
        ({**LLAMA, "num_attention_heads": 0}, "0 attention heads"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size|attention heads"),
        ({**LLAMA, "vocab_size": -1}, "vocab_size=-1"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads=3"),
    ],
)
def test_what_cannot_be_computed_is_refused(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match=said):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"), [(None, "no config.json"), ("{", "cannot be read as JSON"), ("[1]", "holds a list")]
)
def test_damaged_directories(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecError, match=said):
        load_model(tmp_path)


def _shape(model: Any) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(model) if field.name not in ("name", "source")]
    return {name: getattr(model, name) for name in fields}
