"""Text parts of models of text and images, saved by transformers: the same logits from kit's own reading of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kit.engines.huggingface.buffers import SavedBuffers
from kit.engines.huggingface.models import HfDirectory, random_model, source_for_model
from kit.engines.protocol import StateKind
from kit.errors import CheckpointError
from kit.specs.catalog import load_model
from tests.support.hostile import spoil
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
WATCHES = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
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
    "Qwen2VL": {"text_config": TEXT | MROPE, "vision_config": WATCHES | {"hidden_size": 32}},
    "Qwen2_5_VL": {
        "text_config": TEXT | MROPE,
        "vision_config": WATCHES | {"out_hidden_size": 32, "fullatt_block_indexes": [0]},
    },
    "Qwen3VL": {
        "text_config": TEXT | {"head_dim": 8},
        "vision_config": WATCHES
        | {"out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "Qwen3VLMoe": {
        "text_config": TEXT | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "vision_config": WATCHES
        | {"out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
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
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    source = source_for_model(spec, HfDirectory(directory), shapes, SavedBuffers(model, spec), StateKind.MASTER)
    model.load_state_dict({name: source.read(name) for name in shapes}, strict=False)
    return model


def same_logits(own: torch.nn.Module, whole: torch.nn.Module) -> None:
    tokens = torch.arange(2, 42).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(own(tokens).logits, whole(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.everyday("Gemma3")
@pytest.mark.parametrize("name", [name for name in MODELS if name != "Qwen3VLMoe"])
def test_the_text_part_has_the_logits_of_the_whole_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = saved(name, tmp_path)
    capsys.readouterr()
    own = read(tmp_path)
    assert "tensors beside the text part" in capsys.readouterr().out
    same_logits(own, whole)


def test_a_text_part_without_a_layer_is_refused(tmp_path: Path) -> None:
    """Of a model that another test has imported: transformers takes seconds to import one."""
    saved("Gemma3", tmp_path)
    for key, value in (("num_hidden_layers", 3), ("layer_types", ["sliding_attention"] * 3)):
        spoil(tmp_path / "config.json", ("text_config", key), value)
    assert "missing from the checkpoint, first model.layers.2." in refusal(CheckpointError, read, tmp_path)


def as_on_the_hub(directory: Path) -> None:
    """Turns the fused experts of a saved Qwen3-VL: files of the hub are of before transformers 5, with outputs last."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    turned = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items() if ".experts." in name}
    save_file(tensors | turned, file, {"format": "pt"})


@pytest.mark.everyday("True")
@pytest.mark.parametrize("of_hub", [False, True])
def test_fused_experts_are_read_in_blocks(tmp_path: Path, of_hub: bool) -> None:
    """The logits of the whole model; and rows and columns of an expert, as a rank of tensor parallelism reads them."""
    whole = saved("Qwen3VLMoe", tmp_path)
    if of_hub:
        as_on_the_hub(tmp_path)
    same_logits(read(tmp_path), whole)
    source = HfDirectory(tmp_path)
    for name in (name for name in source.names() if ".experts.3." in name):
        whole = source.read(name)
        assert tuple(whole.shape) == source.shape(name)
        assert all(torch.equal(source.read_block(name, dim, 4, 8), whole.narrow(dim, 4, 8)) for dim in (0, 1))
        assert torch.equal(source.read_flat(name, 5, 40), whole.flatten()[5:45])


@pytest.mark.nightly
def test_files_of_before_transformers_5_do_not_set_the_text_part_apart(tmp_path: Path) -> None:
    """Qwen2.5-VL on the hub: the text model's keys and names stand beside ``vision_config`` and ``visual.…``."""
    whole = saved("Qwen2_5_VL", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = {key: value for key, value in config.pop("text_config").items() if key != "model_type"}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 10000.0}
    del text["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(text | config))
    file = tmp_path / "model.safetensors"
    parts = {"model.language_model.": "model.", "model.visual.": "visual."}
    tensors = {
        next((new + name.removeprefix(old) for old, new in parts.items() if name.startswith(old)), name): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    same_logits(read(tmp_path), whole)
