"""Text parts of models of text and images, saved by transformers: the same logits from kit's own reading of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kit.engines.huggingface.buffers import SavedBuffers
from kit.engines.huggingface.models import HfDirectory, random_model, source_for_model
from kit.engines.protocol import StateKind
from kit.errors import CheckpointError
from kit.specs.catalog import load_model
from tests.support.parameter_shapes import parameter_shapes
from tests.support.refusals import refusal

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SEES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MODELS: dict[str, dict[str, Any]] = {
    "Gemma3": {"text_config": TEXT | {"head_dim": 8}, "vision_config": SEES, "mm_tokens_per_image": 4},
    "Llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": SEES | {"model_type": "clip_vision_model"},
    },
    "Mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": SEES | {"model_type": "pixtral", "head_dim": 16},
    },
    "Idefics3": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": SEES, "scale_factor": 2},
    "InternVL": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": SEES | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
    },
    "Llama4": {
        "text_config": TEXT | {"intermediate_size_mlp": 48, "num_local_experts": 4, "head_dim": 8},
        "vision_config": SEES,
    },
}


def saved(name: str, directory: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():  # norms and biases begin as ones and zeros, which any order of names would fit
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def read(directory: Path) -> torch.nn.Module:
    """kit's model of the directory, filled by kit's reader."""
    spec = load_model(str(directory))
    model = random_model(spec, seed=1).eval()
    shapes = parameter_shapes(spec)
    source = source_for_model(spec, HfDirectory(directory), shapes, SavedBuffers(model, spec), StateKind.MASTER)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.read(name))
    return model


@pytest.mark.everyday("Gemma3", "Idefics3")
@pytest.mark.parametrize("name", MODELS)
def test_the_text_part_has_the_logits_of_the_whole_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = saved(name, tmp_path)
    capsys.readouterr()
    own = read(tmp_path)
    assert "tensors beside the text part" in capsys.readouterr().out
    tokens = torch.arange(2, 42).reshape(2, 20)
    with torch.no_grad():
        expected, found = whole(input_ids=tokens).logits, own(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_text_part_without_a_layer_is_refused(tmp_path: Path) -> None:
    saved("Llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "missing from the checkpoint, first model.layers.2." in refusal(CheckpointError, read, tmp_path)
