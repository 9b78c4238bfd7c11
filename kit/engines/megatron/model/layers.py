"""Transformer layers of megatron-core built from torch alone: no Transformer Engine, no apex.

Linear layers, the MLP and the layer itself are megatron-core's. kit replaces the norms, because
``transformer/torch_norm.py`` refuses sequence parallelism, and the core attention, because
``transformer/dot_product_attention.py`` materialises the scores and refuses context parallelism. kit also adds parts
that only some families have; the model's traits choose them (kit/specs/families.py).
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import is_layer_window_attention

from kit.engines.kernels.ring_attention import ring_attention
from kit.engines.megatron.model import cp_all_gather
from kit.engines.megatron.model.adapted_linear import ColumnLinear, RowLinear
from kit.engines.megatron.model.attention import Scores, causal_attention
from kit.engines.megatron.model.layer_variants import (
    ExpertRowParallelLinear,
    NormedRowParallelLinear,
    ParallelResidualLayer,
    ScaledRowParallelLinear,
)
from kit.engines.megatron.model.mla import MultiLatentAttention
from kit.engines.megatron.model.norms import NORMS, WidthRMSNorm
from kit.engines.megatron.model.rope import rotation_factor, score_factor
from kit.engines.megatron.versions import HEADS_LAYER, define_missing_gemm
from kit.errors import EngineError
from kit.specs.model import ModelSpec


class CausalAttention(torch.nn.Module):
    """Causal softmax attention by torch's ``scaled_dot_product_attention``, with grouped-query attention.

    With a sliding window (``TransformerConfig.window_size`` and ``window_attn_skip_freq``), queries are computed in
    blocks, which skip the keys outside of their windows.
    """

    softcap: float | None = None
    """The model's cap of attention scores; None: no cap. ``core_attention`` sets this and the next attributes."""
    rotation_factor: float = 1.0
    """Factor of rotated queries and of rotated keys. Scores are multiplied by its square."""
    stretched: frozenset[int] = frozenset()
    """Numbers (from 1) of the layers that apply ``rotation_factor``."""
    has_sinks: bool = False
    """Whether each head has a sink: a learned additional score in the softmax, without a value."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert pg_collection is not None
        self.ring = cp_comm_type == "p2p"
        self.context_group = pg_collection.cp
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # (left, right), without the token itself (transformer_config.py, window_size)
        window = config.window_size[0] + 1 if windowed else None
        if self.rotation_factor != 1 and layer_number in self.stretched:
            softmax_scale = (softmax_scale or config.kv_channels**-0.5) * self.rotation_factor**2
        self.scores = Scores(softmax_scale, window, self.softcap)
        self.sinks: torch.nn.Parameter | None = None
        if self.has_sinks:
            heads = config.num_attention_heads // pg_collection.tp.size()
            sinks = torch.empty(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
            self.sinks = torch.nn.Parameter(sinks)
            set_tensor_model_parallel_attributes(self.sinks, is_parallel=True, dim=0, stride=1)
        self.dropout = config.attention_dropout
        self.sequence_parallel = config.sequence_parallel
        if self.ring and self.dropout:
            raise EngineError(
                f"attention_dropout={self.dropout} with cp_comm_type=p2p, which has none; use 0.0, or all_gather"
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

        ``attention_mask``: None or ``causal_attention``'s ``documents``, (batch, whole sequence) on every rank.
        megatron-core passes this argument to every layer without reading it, also with recompute.
        """
        assert (attention_bias, packed_seq_params) == (None, None)
        learned = self.scores if self.sinks is None else dataclasses.replace(self.scores, sinks=self.sinks)
        if not (self.training and self.dropout):
            return self._attend(query, key, value, learned, attention_mask)
        # Tensor-parallel ranks have different heads, so each rank needs its own random state
        # (tensor_parallel/random.py). With sequence parallelism megatron-core forks the state for the whole block
        # (transformer_block.py, rng_context), and recompute would not reproduce a second fork inside it.
        with nullcontext() if self.sequence_parallel else get_cuda_rng_tracker().fork():
            scores = dataclasses.replace(learned, dropout=self.dropout)
            return self._attend(query, key, value, scores, attention_mask)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        documents: torch.Tensor | None,
    ) -> torch.Tensor:
        if self.ring and documents is None:
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            attended = ring_attention(query, key, value, self.context_group, scores.scale).permute(2, 0, 1, 3)
        elif self.context_group.size() > 1:
            attended = cp_all_gather.all_gather_attention(query, key, value, self.context_group, scores, documents)
        else:
            attended = causal_attention(query, key, value, scores, documents)
        return attended.flatten(2)


class _DualRotaryAttention(SelfAttention):
    """Self-attention with different rotary frequencies in layers with and without a window. Selects its layer's
    angles."""

    local: frozenset[int]
    """Numbers (from 1) of the layers with windows, also if no sequence is longer than the window."""

    def forward(self, *args: Any, rotary_pos_emb: torch.Tensor, **kwargs: Any) -> Any:
        """``rotary_pos_emb``: (2, sequence, batch or 1, 1, head_dim): first for layers without a window, then for
        layers with a window."""
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb[int(self.layer_number in self.local)], **kwargs)


class _WidthNorms(SelfAttention):
    """Self-attention with one norm over all query heads and one over all key heads.

    This class creates the norms, not the layer's spec: megatron-core 0.19 requires ``qk_layernorm`` for norms in the
    spec, but then sums their gradients over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, **keywords: Any) -> None:
        super().__init__(config=config, **keywords)
        self.q_layernorm, self.k_layernorm = (
            WidthRMSNorm(config, heads, config.kv_channels)
            for heads in (config.num_attention_heads, config.num_query_groups)
        )


def _local_layers(model: ModelSpec) -> frozenset[int]:
    """Numbers (from 1) of the layers with a local RoPE base: layers with a window, if the model has such a base."""
    own = model.local_rope_theta is not None
    return frozenset(layer + 1 for layer in range(model.num_layers) if own and model.window(layer) is not None)


def prediction_heads(
    model: ModelSpec, config: TransformerConfig, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The heads of multi-token prediction of this chunk: all on the last one, none on the others."""
    if not (config.mtp_num_layers and parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)):
        return None
    norm = NORMS[config.normalization]
    layer = {HEADS_LAYER: _layer(model, config, model.has_experts(model.num_layers))}
    head = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, eh_proj=ColumnLinear, layer_norm=norm, **layer
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[head] * model.mtp_num_layers)


def core_attention(model: ModelSpec) -> type[CausalAttention]:
    """``CausalAttention`` with the model's attributes, which megatron-core's configuration cannot express."""
    of_model = {
        "softcap": model.attention_softcap,
        "rotation_factor": rotation_factor(model),
        "stretched": frozenset(
            layer + 1 for layer in range(model.num_layers + model.mtp_num_layers) if model.rotates(layer)
        )
        - _local_layers(model),
        "has_sinks": model.traits.attention_sinks,
    }
    return type("CausalAttention", (CausalAttention,), of_model)


def block_spec(model: ModelSpec, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers and the final norm of this pipeline stage's model chunk."""
    first = get_transformer_layer_offset(config, vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    layers = {has_experts: _layer(model, config, has_experts) for has_experts in (False, True)}
    return TransformerBlockSubmodules(
        layer_specs=[layers[model.has_experts(number)] for number in numbers], layer_norm=NORMS[config.normalization]
    )


def _layer(model: ModelSpec, config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    placement = model.traits.norm_placement
    norm = IdentityOp if placement == "output" else NORMS[config.normalization]
    last: type[RowLinear] = NormedRowParallelLinear if placement in ("both", "output") else RowLinear
    if model.residual_multiplier != 1:
        last = type("ScaledRowParallelLinear", (ScaledRowParallelLinear,), {"factor": model.residual_multiplier})
    linear = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=last)
    return ModuleSpec(
        module=ParallelResidualLayer if model.parallel_residual else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=_attention(model, config, last),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=_experts(model, linear) if has_experts else ModuleSpec(module=MLP, submodules=linear),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention(model: ModelSpec, config: TransformerConfig, last: type[RowLinear]) -> ModuleSpec:
    if model.latent is not None:
        # Yarn also scales the scores (modeling_deepseek_v3.py, yarn_apply_mscale).
        factor = score_factor(model)
        parts = {
            "latent": model.latent,
            "core_attention": core_attention(model),
            "attn_mask_type": AttnMaskType.causal,  # which heads of multi-token prediction require
        }
        return ModuleSpec(
            module=MultiLatentAttention, params={**parts, "softmax_scale": factor * model.latent.query_head_dim**-0.5}
        )
    qk_norm = NORMS[config.normalization] if config.qk_layernorm else IdentityOp
    dual = type("DualRotaryAttention", (_DualRotaryAttention,), {"local": _local_layers(model)})
    attention: type[SelfAttention] = SelfAttention if model.local_rope_theta is None else dual
    if model.traits.qk_norm == "width":
        attention = type("WidthNormedAttention", (_WidthNorms, attention), {})
    return ModuleSpec(
        module=attention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnLinear,
            core_attention=core_attention(model),
            linear_proj=last,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _experts(model: ModelSpec, linear: MLPSubmodules) -> ModuleSpec:
    """A router, experts that a rank computes one after the other, and shared experts, which compute every token."""
    define_missing_gemm()
    shared = ModuleSpec(module=SharedExpertMLP, submodules=linear)
    one = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertRowParallelLinear)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=SequentialMLP, submodules=one),
            shared_experts=shared if model.num_shared_experts else None,
        ),
    )
