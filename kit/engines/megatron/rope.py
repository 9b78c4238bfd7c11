"""Rotary position embedding: the frequencies of transformers itself, so that scaled variants cannot drift apart."""

from __future__ import annotations

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kit.engines.hf import hf_config
from kit.errors import EngineError
from kit.specs.model import ModelSpec

_FIXED = ("default", "linear", "llama3")
"""Kinds of RoPE whose frequencies depend on neither the sequence at hand nor a factor on the result."""


def inverse_frequencies(model: ModelSpec) -> torch.Tensor:
    """fp32, (head_dim / 2): radians per position of each pair of dimensions.

    Raises EngineError for kinds of scaling that frequencies alone cannot express.
    """
    kind = (model.rope_scaling or {}).get("rope_type", "default")
    if kind not in _FIXED:
        raise EngineError(
            f"rope_type={kind} of {model.name}: the Megatron engine computes {', '.join(_FIXED)}; "
            f"use engine torch or deepspeed"
        )
    # All families with RoPE share this computation; the class is Llama's, the configuration the model's own.
    return LlamaRotaryEmbedding(hf_config(model)).inv_freq.detach().clone()
