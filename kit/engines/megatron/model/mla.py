"""DeepSeek's multi-head latent attention (arXiv 2405.04434, section 2.1), for implementation=local.

megatron-core's version (transformer/multi_latent_attention.py) splits the down-projections over tensor-parallel ranks
and gathers their outputs. All heads share the rotated key, but its gradient then lacks the heads of other ranks. Here
every rank has the whole down-projections.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from kit.engines.megatron.model.adapted_linear import ColumnLinear, ReplicatedLinear, RowLinear
from kit.engines.megatron.model.norms import RMSNorm
from kit.specs.model import LatentAttention as LatentSpec

_EPS = 1e-6
"""Epsilon of the norms of latent states, in all models (modeling_deepseek_v3.py, DeepseekV3RMSNorm)."""


class MultiLatentAttention(MegatronModule):
    """Multi-head latent attention, in place of megatron-core's SelfAttention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        latent: LatentSpec,
        core_attention: type[torch.nn.Module],
        softmax_scale: float,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        **newer: Any,
    ) -> None:
        # 0.19 passes each module its name (transformer/transformer_layer.py), which this class does not use.
        assert set(newer) <= {"name"}, newer
        super().__init__(config)
        self._latent, self._tp = latent, pg_collection.tp
        self._heads = config.num_attention_heads // pg_collection.tp.size()
        self._recomputes = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        heads, query = config.num_attention_heads, latent.query_head_dim
        common = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "is_expert": False,
            "tp_group": pg_collection.tp,
        }
        across = {**common, "gather_output": False, "skip_bias_add": False}
        if latent.q_lora_rank is None:
            self.linear_q_proj = ColumnLinear(config.hidden_size, heads * query, **across)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, config.hidden_size, latent.q_lora_rank)
            self.q_layernorm = RMSNorm(config, latent.q_lora_rank, _EPS)
            self.linear_q_up_proj = ColumnLinear(latent.q_lora_rank, heads * query, **across)
        self.linear_kv_down_proj = ReplicatedLinear(
            config, config.hidden_size, latent.kv_lora_rank + latent.rope_head_dim
        )
        self.kv_layernorm = RMSNorm(config, latent.kv_lora_rank, _EPS)
        key_value = latent.nope_head_dim + latent.value_head_dim
        self.linear_kv_up_proj = ColumnLinear(latent.kv_lora_rank, heads * key_value, **across)
        self.core_attention = core_attention(
            config=config,
            layer_number=layer_number,
            softmax_scale=softmax_scale,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        self.linear_proj = RowLinear(
            heads * latent.value_head_dim, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **common
        )

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, rotary_pos_emb: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """(sequence, batch, hidden) → (sequence, batch, hidden), and None for the bias. With sequence parallelism
        ``sequence`` is this rank's part. ``attention_mask``: as in ``CausalAttention.forward``."""
        latent = self._latent
        if latent.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        query = query.unflatten(-1, (self._heads, latent.query_head_dim))
        query, turned = query.split([latent.nope_head_dim, latent.rope_head_dim], dim=-1)
        query = torch.cat([query, _rotated(turned, rotary_pos_emb)], dim=-1)

        compressed, shared = self.linear_kv_down_proj(hidden_states).split(
            [latent.kv_lora_rank, latent.rope_head_dim], dim=-1
        )
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(compressed))
        key_value = key_value.unflatten(-1, (self._heads, latent.nope_head_dim + latent.value_head_dim))
        key, value = key_value.split([latent.nope_head_dim, latent.value_head_dim], dim=-1)
        shared = _rotated(self._whole(shared).unsqueeze(2), rotary_pos_emb)
        key = torch.cat([key, shared.expand(-1, -1, self._heads, -1)], dim=-1)

        if self._recomputes and self.training:
            attended = tensor_parallel.checkpoint(self.core_attention, False, query, key, value, attention_mask)
        else:
            attended = self.core_attention(query, key, value, attention_mask)
        return self.linear_proj(attended)[0], None

    def _whole(self, shared: torch.Tensor) -> torch.Tensor:
        """(sequence / tp, batch, d) → (sequence, batch, d) of the key that all heads share. Backward all-reduces the
        gradient over tensor-parallel ranks, because each rank has only some of the heads."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(shared, tensor_parallel_output_grad=True, group=self._tp)
        return copy_to_tensor_model_parallel_region(shared, group=self._tp)


def _rotated(tensor: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbouring dimensions (transformers, apply_rotary_pos_emb_interleave)."""
    return _apply_rotary_pos_emb_bshd(tensor, angles, rotary_interleaved=False, multi_latent_attention=True)
