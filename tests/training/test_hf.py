"""ModelSpec → transformers: shapes, seeds, and weights from directories as they are found."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from argparse import Namespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kit.engines.huggingface import experts
from kit.engines.huggingface.models import (
    HfDirectory,
    check_names,
    check_shape,
    hf_config,
    random_model,
)
from kit.engines.io.sharded_safetensors import SafetensorsSource
from kit.errors import CheckpointError, SpecError
from tests.support import tiny
from tests.support.checkpoints import InMemory
from tests.support.files import file_with
from tests.support.parameter_shapes import parameter_shapes
from tests.support.refusals import refusal

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "mixtral", "qwen3_moe")
INDEX = "model.safetensors.index.json"


def test_layers_of_multi_token_prediction_are_left_out_with_a_word(tmp_path, capsys):
    spec = tiny.model("deepseek_v3", num_shared_experts=1)
    random_model(spec, seed=7).save_pretrained(tmp_path)
    names = set(HfDirectory(tmp_path).names())
    weights = load_file(tmp_path / "model.safetensors")
    later = {f"model.layers.{spec.num_layers}.{name}": torch.zeros(2) for name in ("enorm.weight", "eh_proj.weight")}
    save_file(weights | later, tmp_path / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    config = json.loads((tmp_path / "config.json").read_text())
    for told, found in ((0, names | later.keys()), (1, names)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": told}))
        assert set(HfDirectory(tmp_path).names()) == found
    assert "2 tensors of multi-token prediction" in capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_config_survives_a_round_trip_through_a_directory(family, tmp_path):
    """In one file or in many; parts of tensors, of fused experts too, are slices of the whole."""
    spec = tiny.model(family)
    model = random_model(spec, seed=7).eval()
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB" if family in ("llama", "mixtral") else "5GB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 1 or family in ("llama", "mixtral")
    source = HfDirectory(tmp_path / "hf")
    check_names(parameter_shapes(spec), source)
    in_memory = experts.FusedExpertsSource(spec, source, [name for name, _ in model.named_parameters()])
    for fused, parameter in model.named_parameters():
        for name, tensor in experts.split_experts(spec, fused, parameter):
            assert torch.equal(source.read(name), tensor)
            assert source.shape(name) == tuple(tensor.shape)
        whole = in_memory.read(fused)
        assert torch.equal(whole, parameter)
        assert in_memory.shape(fused) == tuple(parameter.shape)
        assert all(
            torch.equal(in_memory.read_flat(fused, start, length), whole.flatten()[start : start + length])
            for start, length in ((0, 7), (whole.numel() // 3, whole.numel() // 2), (whole.numel() - 5, 9))
        )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
    tokens = torch.arange(20)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_rope_parameters():
    """The rotation must really use them: base and factor show in the lowest frequency, of dimension 6 of 8."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    plain, long = (
        random_model(tiny.model(rope_theta=5e5, rope_scaling=scaling), seed=0).model.rotary_emb.inv_freq[-1].item()
        for scaling in (None, llama3 | {"original_max_position_embeddings": 32})
    )
    assert (plain, plain / long) == (pytest.approx(5e5 ** (-6 / 8)), pytest.approx(8.0))


def test_seed_decides_the_weights_and_leaves_the_callers_random_state_alone():
    before = torch.get_rng_state()
    first, second, other = (dict(random_model(tiny.model(), seed=seed).named_parameters()) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gpt2", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ("gpt2", {"head_dim": 16}, "head_dim=16"),
        ("phi3", {"head_dim": 16}, "head_dim=16"),
        ("llama", {"rope_theta": None}, "rope_theta=null"),
        ("llama", {"hidden_size": 30}, "transformers refuses"),
    ],
)
def test_impossible_shapes_are_refused(family, change, message):
    assert re.search(message, refusal(SpecError, lambda: hf_config(tiny.model(family, **change))))


def test_gpt2_as_it_lies_on_the_hub(tmp_path):
    """No base prefix, causal masks saved as buffers, the tied output projection present."""
    rundir = tiny.run_directory(tmp_path / "run", tiny.plan(tiny.model("gpt2")))
    model = random_model(rundir.plan.model, rundir.run.seed)
    stored = {name.removeprefix("transformer."): p.detach().clone() for name, p in model.named_parameters()}
    stored |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "lm_head.weight": stored["wte.weight"].clone()}
    file_with(tmp_path / "hf" / "config.json", json.dumps({"model_type": "gpt2"}))
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    source = HfDirectory(tmp_path / "hf")
    check_names(parameter_shapes(rundir.plan.model), source)
    assert torch.equal(source.read("transformer.h.1.mlp.c_fc.weight"), stored["h.1.mlp.c_fc.weight"])


# Damaged directory


@pytest.fixture
def directory(tmp_path):
    random_model(tiny.model(), seed=7).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (shutil.rmtree, r"no readable config\.json"),
        (lambda it: (it / INDEX).write_text('{"weight_map": {"x": "../y.safetensors"}}'), "names ../y"),
        (lambda it: (it / INDEX).write_text("{}"), "is not a safetensors"),
        (lambda it: os.truncate(it / "model.safetensors", 1000), r"model\.safetensors cannot be read"),
    ],
)
def test_damage_is_named(directory, damage, says):
    damage(directory)
    assert re.search(says, refusal(CheckpointError, HfDirectory, directory))


def test_pickles_only(directory):
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    assert "neither model.safetensors nor pytorch_model.bin" in refusal(CheckpointError, HfDirectory, directory)
    torch.save(tensors, directory / "pytorch_model.bin")  # as transformers wrote until 2023
    found = HfDirectory(directory)
    assert len(found.names()) == len(tensors)
    assert all(torch.equal(found.read(name), tensors[name]) for name in found.names())
    assert all(torch.equal(found.read_flat(name, 3, 5), tensors[name].flatten()[3:8]) for name in found.names())
    torch.save(tensors | {"x": Namespace()}, directory / "pytorch_model.bin")
    assert "names argparse.Namespace, which is not in the closed list" in refusal(
        CheckpointError, HfDirectory, directory
    )


def test_missing_and_foreign_names_and_other_shapes(directory):
    expected, tensors = parameter_shapes(tiny.model()), load_file(directory / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    for found, match in (
        (tensors, r"missing from the checkpoint, first model\.norm\.weight"),
        (tensors | {"model.norm.weight": norm, "model.spare": norm.clone()}, r"has not, first model\.spare"),
    ):
        save_file(found, directory / "model.safetensors")
        assert re.search(match, refusal(CheckpointError, lambda: check_names(expected, HfDirectory(directory))))
    assert "shape [3, 2] in the checkpoint and [2, 3]" in refusal(CheckpointError, check_shape, "a", (2, 3), (3, 2))


@pytest.mark.parametrize("shape", [(7, 5), (6,), (3, 2, 4)])
def test_parts_of_tensors_are_slices_of_the_whole(shape, tmp_path):
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    save_file({"stored": whole}, tmp_path / "one.safetensors")
    source = SafetensorsSource({"given": tmp_path / "one.safetensors"}, {"given": "stored"})
    for start in range(whole.numel() + 3):
        assert all(
            torch.equal(source.read_flat("given", start, length), whole.flatten()[start : start + length])
            for length in range(1, whole.numel() + 3)
        )


def test_a_tensor_is_read_once_for_all_its_parts():
    """Where a source reads whole tensors alone."""
    source = InMemory({"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(4)})
    source.read = mock.Mock(wraps=source.read)
    assert (source.shape("a"), source.read_flat("a", 2, 3).tolist()) == ((2, 3), [2, 3, 4])
    assert (source.read_block("a", 1, 2, 1).tolist(), source.shape("b")) == ([[2], [5]], (4,))
    assert source.read.mock_calls == [mock.call("a"), mock.call("b")]
