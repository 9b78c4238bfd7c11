"""DeepSeek-V3: latent attention; a dense MLP in the first layers, a router, shared and routed experts in the others.

GLM-4.5 has Llama's attention instead.
"""

from __future__ import annotations

import dataclasses

from kit.engines.megatron.weights.llama import LAYER, QK_NORMS, QKV_BIAS, WITHOUT_MLP, experts, in_layer, llama
from kit.engines.megatron.weights.mapping import ParamMapping
from kit.engines.megatron.weights.sharding import ColumnParallel, Replicated, RowParallel, Sharding
from kit.specs.model import ModelSpec


def _attention(megatron: str, hugging_face: str, sharding: Sharding) -> ParamMapping:
    return in_layer(f"self_attention.{megatron}.weight", f"self_attn.{hugging_face}.weight", sharding=sharding)


_COMPRESSED_QUERY = (
    _attention("linear_q_down_proj", "q_a_proj", Replicated()),
    _attention("q_layernorm", "q_a_layernorm", Replicated()),
    _attention("linear_q_up_proj", "q_b_proj", ColumnParallel()),
)
_QUERY = (_attention("linear_q_proj", "q_proj", ColumnParallel()),)
_KEY_VALUE = (
    _attention("linear_kv_down_proj", "kv_a_proj_with_mqa", Replicated()),
    _attention("kv_layernorm", "kv_a_layernorm", Replicated()),
    _attention("linear_kv_up_proj", "kv_b_proj", ColumnParallel()),
)
_NORMS_AND_OUTPUT = tuple(
    mapping for mapping in LAYER if "linear_qkv" not in mapping.megatron and ".mlp." not in mapping.megatron
)
_DENSE_MLP = tuple(dataclasses.replace(mapping, experts=False) for mapping in LAYER if ".mlp." in mapping.megatron)
_SHARED = "mlp.shared_experts."
_SHARED_EXPERTS = (
    in_layer(
        f"{_SHARED}linear_fc1.weight",
        f"{_SHARED}gate_proj.weight",
        f"{_SHARED}up_proj.weight",
        sharding=ColumnParallel(),
    ),
    in_layer(f"{_SHARED}linear_fc2.weight", f"{_SHARED}down_proj.weight", sharding=RowParallel()),
)
CORRECTION = dataclasses.replace(
    in_layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", sharding=Replicated()), frozen=True
)
_ROUTED = (CORRECTION, *experts("mlp", "gate_proj", "up_proj", "down_proj"), *_SHARED_EXPERTS)
_MLP = (*_DENSE_MLP, *(dataclasses.replace(mapping, experts=True) for mapping in _ROUTED))
"""The MLP of layers without experts, and router and experts of the other layers. On disk a model without shared experts
has them with a width of 0."""


def deepseek_v3(model: ModelSpec) -> tuple[ParamMapping, ...]:
    """The weight map of DeepSeek-V3."""
    assert model.latent is not None
    query = _QUERY if model.latent.q_lora_rank is None else _COMPRESSED_QUERY
    return llama(model, (*_NORMS_AND_OUTPUT, *query, *_KEY_VALUE, *_MLP))


def glm4_moe(model: ModelSpec) -> tuple[ParamMapping, ...]:
    """The weight map of GLM-4.5. Some models have biases on query, key and value, and norms per head."""
    biases = (QKV_BIAS,) if model.qkv_bias else ()
    norms = QK_NORMS if model.traits.qk_norm == "head" else ()
    return llama(model, (*WITHOUT_MLP, *biases, *norms, *_MLP))
