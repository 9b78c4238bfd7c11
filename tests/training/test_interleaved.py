"""gpt-oss: experts that lie fused and interleaved on disk are tensors of their own everywhere else, there and back."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from kit.engines.huggingface import experts, models
from kit.engines.huggingface.models import HfDirectory, tensor_shapes
from kit.engines.protocol import place
from kit.errors import CheckpointError
from kit.training.checkpoint.to_huggingface import write_hf
from tests.support import tiny
from tests.support.refusals import refusal


@pytest.fixture
def saved(tmp_path):
    """(spec, model of transformers, its directory)."""
    spec = tiny.model("gpt_oss", sliding_window=7, full_attention_every=2)
    torch.manual_seed(3)
    model = models.AutoModelForCausalLM.from_config(models.hf_config(spec), attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)  # biases that are not zero
    model.save_pretrained(tmp_path / "model")
    return spec, model, tmp_path / "model"


def test_a_directory_shows_each_matrix_of_each_expert(saved):
    spec, model, path = saved
    source = HfDirectory(path)
    assert sorted(source.names()) == sorted(tensor_shapes(spec))
    fused = model.model.layers[1].mlp.experts.gate_up_proj.data
    assert torch.equal(source.read("model.layers.1.mlp.experts.2.up_proj.weight"), fused[2, :, 1::2].t())
    for name, shape in tensor_shapes(spec).items():
        whole = source.read(name)
        assert tuple(whole.shape) == tuple(shape) == source.shape(name)
        assert torch.equal(source.read_block(name, 0, 1, 3), whole[1:4])
        assert torch.equal(source.read_flat(name, 2, 4), whole.flatten()[2:6])
        if whole.ndim == 2:
            assert torch.equal(source.read_block(name, 1, 2, 3), whole[:, 2:5])


def test_parameters_become_them_and_come_back(saved, tmp_path):
    spec, model, path = saved
    source, parameters = HfDirectory(path), dict(model.named_parameters())
    for name, parameter in parameters.items():
        assert [
            each
            for each, part in experts.split_experts(spec, name, parameter.detach())
            if not torch.equal(part, source.read(each))
        ] == []
    fused = experts.FusedExpertsSource(spec, source, list(parameters))
    for name, parameter in parameters.items():
        assert torch.equal(fused.read(name), parameter)
        assert fused.shape(name) == tuple(parameter.shape)
        assert torch.equal(fused.read_flat(name, 3, 5), parameter.flatten()[3:8])
    write_hf(spec, source, tmp_path / "again", dtype="float32")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", local_files_only=True)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "llama"])
def test_ranges_of_a_flat_parameter_become_them(family):
    """As ZeRO cuts it: anywhere, within a row too."""
    uneven = {"moe_ffn_hidden_size": 7, "ffn_hidden_size": 7, "sliding_window": 7, "full_attention_every": 2}
    spec = tiny.model(family, **(uneven if family == "gpt_oss" else {}))
    for name, parameter in models.build_skeleton(spec).named_parameters():
        whole = torch.arange(float(parameter.numel())).view(parameter.shape)
        expected = dict(experts.split_experts(spec, name, whole))
        found = {each: torch.full_like(part, torch.nan) for each, part in expected.items()}
        cuts = sorted({0, 1, whole.numel() // 7, whole.numel() // 2 + 3, whole.numel() - 1, whole.numel()})
        written = 0
        for start, end in pairwise(cuts):
            for each, shape, row, column, part in experts.split_range(
                spec, name, tuple(whole.shape), start, whole.flatten()[start:end]
            ):
                assert shape == found[each].shape
                place(found[each], row, column, part)
                written += part.numel()
        assert written == whole.numel()
        assert all(torch.equal(found[each], part) for each, part in expected.items()), name


def test_quantised_experts_are_refused(saved):
    from safetensors.torch import load_file, save_file

    _, _, path = saved
    tensors = load_file(path / "model.safetensors")
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[f"{fused}_blocks"] = tensors.pop(fused)
    save_file(tensors, path / "model.safetensors")
    assert re.search(r"gate_up_proj_blocks .* is quantised \(mxfp4\)", refusal(CheckpointError, HfDirectory, path))
