"""Rotary position embedding: the frequencies of transformers itself, so that scaled variants cannot drift apart.

Positions are those of the row, or start again in every document of it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kit.engines.hf import hf_config
from kit.errors import EngineError
from kit.specs.model import ModelSpec

_FIXED = ("default", "linear", "llama3")
"""Kinds of RoPE whose frequencies depend on neither the sequence at hand nor a factor on the result."""


class Rotation(RotaryEmbedding):
    """megatron-core's rotary embedding with other frequencies, and for one forward pass with other positions."""

    def __init__(self, model: ModelSpec, cp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__(kv_channels=model.head_dim, rotary_percent=1.0, cp_group=cp_group)
        # megatron-core knows one set of Llama-3 factors only (rotary_pos_embedding.py, _apply_scaling).
        self.inv_freq = inverse_frequencies(model).to(self.inv_freq.device)
        self.positions: torch.Tensor | None = None
        """(batch, sequence of this rank); None: 0, 1, 2, … in every row."""

    def forward(self, max_seq_len: int, **kwargs: Any) -> torch.Tensor:
        """(sequence of this rank, 1 or batch, 1, head_dim): angles."""
        if self.positions is None:
            return super().forward(max_seq_len, **kwargs)
        angles = self.positions.t()[..., None] * self.inv_freq
        return torch.cat((angles, angles), dim=-1).unsqueeze(2)


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
