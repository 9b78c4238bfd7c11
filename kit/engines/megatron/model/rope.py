"""Rotary position embedding with frequencies from transformers' own functions, so that scaled variants are equal.

Positions count over the row, or restart in every document of the row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kit.engines.huggingface.models import hf_config
from kit.errors import EngineError
from kit.specs.model import ModelSpec

_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
"""Supported kinds of RoPE: each is a set of frequencies and one factor. longrope has a second set for long
sequences."""


class HfRotaryEmbedding(RotaryEmbedding):
    """megatron-core's rotary embedding with transformers' frequencies, and with positions that a forward pass may
    set."""

    inv_freq: torch.Tensor

    def __init__(self, model: ModelSpec, cp_group: torch.distributed.ProcessGroup, local: bool = False) -> None:
        super().__init__(kv_channels=model.head_dim, rotary_percent=1.0, cp_group=cp_group)
        # megatron-core supports one set of Llama-3 factors only (rotary_pos_embedding.py, _apply_scaling).
        self.inv_freq = self._short = inverse_frequencies(model, local).to(self.inv_freq.device)
        longrope = (model.rope_scaling or {}).get("rope_type") == "longrope"
        self._long = inverse_frequencies(model, long=True).to(self._short.device) if longrope else self._short
        self._original = _original_length(model)
        self.positions: torch.Tensor | None = None
        """(batch, sequence of this rank); None: 0, 1, 2, … in every row."""

    def forward(self, max_seq_len: int, **kwargs: Any) -> torch.Tensor:
        """Angles: (sequence of this rank, 1 or batch, 1, head_dim)."""
        if self._long is not self._short:
            longest = max_seq_len if self.positions is None else self._longest(self.positions)
            self.inv_freq = self._long if longest > self._original else self._short
        if self.positions is None:
            return super().forward(max_seq_len, **kwargs)
        angles = self.positions.t()[..., None] * self.inv_freq
        return torch.cat((angles, angles), dim=-1).unsqueeze(2)

    def _longest(self, positions: torch.Tensor) -> int:
        """Length of the longest document over all rows, as in transformers (modeling_rope_utils.py,
        longrope_frequency_update). All-reduces over context-parallel ranks, which have parts of documents."""
        longest = positions.max() + 1
        if self.cp_group.size() > 1:
            torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX, group=self.cp_group)
        return int(longest)


class DualRotaryEmbedding(torch.nn.Module):
    """Angles for layers without a window and for layers with a window, stacked: megatron-core passes one tensor to all
    layers."""

    positions: torch.Tensor | None = None
    """Positions of the tokens (``HfRotaryEmbedding.positions``)."""

    def __init__(self, model: ModelSpec, cp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self._both: Any = torch.nn.ModuleList(HfRotaryEmbedding(model, cp_group, local) for local in (False, True))
        self.get_rotary_seq_len = self._both[0].get_rotary_seq_len

    def forward(self, max_seq_len: int, **kwargs: Any) -> torch.Tensor:
        """Angles: (2, sequence of this rank, 1 or batch, 1, head_dim)."""
        for rotation in self._both:
            rotation.positions = self.positions
        return torch.stack([rotation(max_seq_len, **kwargs) for rotation in self._both])


def inverse_frequencies(model: ModelSpec, local: bool = False, long: bool = False) -> torch.Tensor:
    """Radians per position for each rotated pair of dimensions: fp32, (rotated dimensions of a head / 2).

    ``local``: for layers with a window, with the local base and without scaling. ``long``: for longrope's long
    sequences. Raises EngineError for kinds of scaling that frequencies alone cannot express.
    """
    kind = (model.rope_scaling or {}).get("rope_type", "default")
    if kind not in _KINDS:
        raise EngineError(
            f"rope_type={kind} of {model.name}: the Megatron engine computes {', '.join(_KINDS)}; "
            f"use engine torch or deepspeed"
        )
    if kind == "default" or local:
        base = model.local_rope_theta if local else model.rope_theta
        assert base is not None, "a model without rotary positions"
        rotated = model.head_dim if model.latent is None else model.latent.rope_head_dim
        width = int(rotated * model.partial_rotary_factor)
        return 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    return _scaled(model, kind, long)[0]


def rotation_factor(model: ModelSpec) -> float:
    """Factor of rotated queries and keys with scaled RoPE (yarn, longrope); otherwise 1.

    Raises EngineError if the factor is not 1 and only a part of each head is rotated: a factor of the scores cannot
    express it then.
    """
    kind = (model.rope_scaling or {}).get("rope_type", "default")
    if kind == "default" or kind not in _KINDS:
        return 1.0
    factor = _scaled(model, kind)[1]
    if factor != 1 and (model.latent is not None or model.partial_rotary_factor != 1):
        raise EngineError(
            f"rope_type={kind} of {model.name} multiplies parts of queries and keys by {factor:.4f}, which the "
            "Megatron engine does not; use engine torch or deepspeed"
        )
    return factor


def _scaled(model: ModelSpec, kind: str, long: bool = False) -> tuple[torch.Tensor, float]:
    options: dict[str, Any] = {"layer_type": "full_attention"} if model.local_rope_theta else {}
    if long and kind == "longrope":
        options["seq_len"] = _original_length(model) + 1
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf_config(model), **options)
    return frequencies, float(factor)


def _original_length(model: ModelSpec) -> int:
    """``original_max_position_embeddings`` of RoPE scaling, by default the model's maximum (as in
    kit/specs/hf_family_rules.py)."""
    return int((model.rope_scaling or {}).get("original_max_position_embeddings", model.max_position_embeddings))


def score_factor(model: ModelSpec) -> float:
    """Factor of latent attention's scores with yarn: its mscale, squared (transformers, modeling_deepseek_v3.py,
    yarn_apply_mscale); otherwise 1."""
    scaling = model.rope_scaling or {}
    mscale, factor = scaling.get("mscale_all_dim", 0), scaling.get("factor", 1)
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2 if mscale and factor > 1 else 1.0
