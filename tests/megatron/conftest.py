"""One Hugging Face model and one reference trajectory for each shape, computed once a session."""

from __future__ import annotations

import functools

import pytest
import torch

from kit.engines.huggingface import models
from kit.engines.huggingface.adapters import adapt, adapter_shapes, trainable
from kit.engines.huggingface.buffers import is_buffer
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec
from tests.megatron import cases


def steps(spec: ModelSpec) -> int:
    """How long trajectories are compared: with experts not until a token at a tie is rounded to another one."""
    return 3 if spec.num_experts else 4


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    """``references(spec) → (directory beside which run directories go, trajectory)``; with ``lora`` of its adapters."""

    @functools.cache
    def reference(spec: ModelSpec, packed: bool, lora: LoraSpec | None, eps: float):
        directory = tmp_path_factory.mktemp(spec.name)
        model = saved_model(spec, directory / "model")
        if lora is not None:
            adapt(model, lora)
            adapters = cases.RandomAdapters(adapter_shapes(spec, lora), seed=0)
            for name, parameter in trainable(model).items():
                parameter.data.copy_(adapters.read(name))
        return directory, cases.reference(spec, model, steps(spec), eps=eps, packed=packed)

    return lambda spec, packed=False, lora=None, eps=cases.EPS: reference(spec, packed, lora, eps)


def saved_model(spec: ModelSpec, path):
    """A transformers model saved to ``path``, with norms, biases and corrections off their neutral values."""
    torch.manual_seed(3)
    attention = "sdpa" if spec.traits.fused_attention else "eager"
    model = models.AutoModelForCausalLM.from_config(models.hf_config(spec), attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        for name, buffer in model.named_buffers():
            if is_buffer(name):
                buffer.normal_(std=0.1)
    model.save_pretrained(path)
    return model
