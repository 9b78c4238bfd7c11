"""Transformer layers of megatron-core built from torch alone: no Transformer Engine, no apex.

The linear layers, the MLP and the layer itself are megatron-core's own. Ours are the two parts for which it
offers torch code that refuses what we need: norms (``transformer/torch_norm.py`` refuses sequence parallelism) and
the core attention (``transformer/dot_product_attention.py`` materialises the scores and refuses context parallelism).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from kit.engines.megatron import context
from kit.engines.megatron.attention import causal_attention
from kit.engines.megatron.ring import ring_attention
from kit.errors import EngineError


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last dimension.

    With sequence parallelism each tensor-parallel rank sees its part of the sequence only, so the gradient of the
    weight must be summed over them: ``sequence_parallel`` on the weight asks
    ``distributed/finalize_model_grads.py`` for it.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class LayerNorm(torch.nn.LayerNorm):
    """Layer norm over the last dimension; weight and bias take part in sequence parallelism as those of RMSNorm do."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias.sequence_parallel = config.sequence_parallel


NORMS = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


class CausalAttention(torch.nn.Module):
    """Causal softmax attention by torch's ``scaled_dot_product_attention``, grouped-query heads included.

    With a sliding window (``TransformerConfig.window_size``) in blocks that skip what no query of them sees.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert pg_collection is not None
        self.ring = cp_comm_type == "p2p"
        self.softmax_scale = softmax_scale
        self.context_group = pg_collection.cp
        # (to the left, to the right), the token itself not counted (transformer_config.py, window_size)
        self.window = None if config.window_size is None else config.window_size[0] + 1
        if config.attention_dropout:
            raise EngineError(
                f"attention_dropout={config.attention_dropout}: the torch-native layers have none; use 0.0"
            )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """(sequence, batch, heads, head_dim), keys and values with fewer heads → (sequence, batch, heads·head_dim).

        ``attention_mask``, which megatron-core hands down to every layer unread, and through recompute, is None or the
        documents of ``causal_attention``: (batch, whole sequence) on every rank.
        """
        assert (attention_bias, packed_seq_params) == (None, None)
        how = self.softmax_scale, self.window, attention_mask
        if self.ring and (self.window, attention_mask) == (None, None):
            attended = ring_attention(query, key, value, self.context_group, self.softmax_scale)
        elif self.context_group.size() > 1:
            attended = context.attention(query, key, value, self.context_group, *how)
        else:
            attended = causal_attention(query, key, value, *how)
        return attended.flatten(2)


def _mlp_spec(config: TransformerConfig) -> ModuleSpec:
    """A dense MLP, or a router and experts, which a rank computes one after the other."""
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if config.num_moe_experts is None:
        return ModuleSpec(module=MLP, submodules=linear)
    if not moe_utils.HAVE_TE:
        # router_gating_linear compares this name with None, but without Transformer Engine it does not exist.
        moe_utils.te_general_gemm = None
    experts = ModuleSpec(module=SequentialMLP, submodules=linear)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts))


def block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers and the final norm of this pipeline stage's model chunk."""
    norm = NORMS[config.normalization]
    qk_norm = norm if config.qk_layernorm else IdentityOp
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=CausalAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=_mlp_spec(config),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)
