"""Experts under autocast compute in 16 bits, as linear layers do; without autocast nothing changes."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from kit.engines.huggingface.expert_autocast import cast_experts
from kit.engines.huggingface.models import hf_config
from tests.megatron.shapes import BY_FAMILY
from tests.support import tiny


class GroupedGemms(TorchDispatchMode):
    """The dtypes of all grouped GEMMs, forward and backward."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "grouped_mm" in str(function):
            self.dtypes += [each.dtype for each in args[:2]]
        return function(*args, **(kwargs or {}))


def gradients(family, autocast, cast):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(tiny.model(family, **BY_FAMILY.get(family, {}))))
    if cast:
        cast_experts(model)
    ids = torch.arange(32).reshape(2, 16) % 100
    with GroupedGemms() as gemms:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return gemms.dtypes, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen2_moe", "deepseek_v3"])
def test_experts_compute_in_the_dtype_of_autocast(family):
    alone, expected = gradients(family, autocast=False, cast=False)
    assert set(alone) == {torch.float32}
    same, unchanged = gradients(family, autocast=False, cast=True)
    assert set(same) == {torch.float32}
    assert all(torch.equal(unchanged[name], expected[name]) for name in expected)
    short, rounded = gradients(family, autocast=True, cast=True)
    assert (set(short), len(short)) == ({torch.bfloat16}, len(alone))
    for name, gradient in expected.items():
        assert rounded[name].dtype is torch.float32
        if ".experts." in name:
            assert (rounded[name] - gradient).norm() < 0.05 * gradient.norm(), name


def test_transformers_alone_computes_experts_in_fp32_under_autocast():
    """The reason for expert_autocast.py. If it fails, transformers or torch has learned it: delete that file."""
    assert set(gradients("mixtral", autocast=True, cast=False)[0]) == {torch.float32}
