"""What ``kit convert inspect`` says of a Hugging Face directory: whether transformers and GGUF's names take it."""

from __future__ import annotations

from unittest import mock

import pytest
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kit.addons.importers import readers
from kit.addons.importers.inspected import inspected
from kit.engines.huggingface.models import random_model
from kit.specs.families import ENCODER_DECODER, FAMILIES
from kit.training.checkpoint.convert import convert
from tests.support import tiny


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("llama", "llama"),
        ("mixtral", "llama"),
        ("qwen3_moe", "qwen3moe"),
        ("gpt2", "gpt2"),
        ("deepseek_v3", "deepseek2"),
    ],
)
def test_what_kit_writes_is_taken(tmp_path, family, architecture):
    random_model(tiny.model(family), seed=1).save_pretrained(tmp_path / "start")
    convert(tmp_path / "start", "step", tmp_path / "step")
    convert(tmp_path / "step", "hf", tmp_path / "model")
    transformers, gguf, vllm = inspected(tmp_path / "model").notes[:3]
    assert transformers.endswith("loads every tensor")
    assert " lists " in vllm
    assert gguf.endswith(f"has a name for every tensor, of architecture {architecture}")


@pytest.fixture
def model(tmp_path):
    random_model(tiny.model(), seed=1).save_pretrained(tmp_path)
    return tmp_path


def test_a_model_and_one_file_of_it_say_what_they_hold(model):
    """The step by transformers' Trainer, which writes it beside the model."""
    (model / "trainer_state.json").write_text('{"global_step": 7}')
    tensors = load_file(model / "model.safetensors")
    holds = (sum(tensor.numel() for tensor in tensors.values()), len(tensors), ["float32"], False)
    for path, said, commands in ((model, ("hf", 7), 1), (model / "model.safetensors", ("file", None), 0)):
        found = inspected(path)
        assert (found.format, found.step) == said
        assert (found.parameters, found.tensors, found.dtypes, found.adam) == holds
        assert len(found.can) == commands


def test_another_name_and_another_shape_are_said(model):
    path, name = model / "model.safetensors", "model.layers.0.self_attn.k_proj.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name][:8].clone()}, path, metadata={"format": "pt"})
    assert "tensors 1 misshapen" in readers.readers(model)[0] or "does not load it" in readers.readers(model)[0]
    tensors["model.layers.0.self_attn.key.weight"] = tensors.pop(name)
    save_file(tensors, path, metadata={"format": "pt"})
    transformers, gguf, _ = readers.readers(model)
    assert f"tensors 1 missing, as {name}; 1 unknown, as model.layers.0.self_attn.key.weight" in transformers
    assert "has no name for 1 tensors of architecture llama, as model.layers.0.self_attn.key.weight" in gguf


def test_other_architectures_and_a_missing_package_are_said(model, monkeypatch):
    config = (model / "config.json").read_text()
    for name in ("OtherForCausalLM", "pipeline"):
        (model / "config.json").write_text(config.replace("LlamaForCausalLM", name))
        transformers, _, vllm = readers.readers(model)
        assert transformers.endswith(f"has no class {name}")
        assert f"was not found to list {name}" in vllm
    assert readers._gguf("other_model", 2, []).endswith("has no architecture for model_type other_model")
    monkeypatch.setattr(readers, "version", mock.Mock(side_effect=readers.PackageNotFoundError("gguf")))
    assert readers.readers(model)[1] == "GGUF: not checked; pip install 'deepspeed-megatron-kit[gguf]'"
    (model / "model.safetensors").unlink()
    assert readers.readers(model) == []


def test_vllm_lists_the_decoders_of_every_family():
    """And no model of two stacks: Bart, Blenderbot, T5."""
    listed = set(readers._IN_VLLM.split())
    classes = {name: str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name, "")) for name in FAMILIES}
    assert {name for name, found in classes.items() if found not in listed} == set(ENCODER_DECODER)
    assert listed <= set(classes.values())
