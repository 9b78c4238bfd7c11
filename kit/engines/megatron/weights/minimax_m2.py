"""MiniMax M2: Mixtral with norms over all query and over all key heads, and DeepSeek's router correction bias."""

from __future__ import annotations

import dataclasses

from kit.engines.megatron.weights.deepseek import CORRECTION
from kit.engines.megatron.weights.llama import WIDTH_NORMS, WITHOUT_MLP, experts

_NAME = "model.layers.{layer}.block_sparse_moe.e_score_correction_bias"
MINIMAX_M2 = (
    *WITHOUT_MLP,
    *WIDTH_NORMS,
    dataclasses.replace(CORRECTION, hugging_face=(_NAME,)),
    *experts("block_sparse_moe", "w1", "w3", "w2"),
)
