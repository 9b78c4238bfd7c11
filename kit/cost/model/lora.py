"""Parameters of LoRA's adapters (arXiv 2106.09685, section 4): r·(inputs + outputs) for every adapted matrix."""

from __future__ import annotations

from functools import lru_cache

from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec


@lru_cache(maxsize=64)
def named_layers(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """Last name of each linear layer that ``lora.target_modules`` may list → (inputs, outputs). Empty where a family
    fuses projections or gives them other names. Only attention's of a model with experts, whose MLPs differ."""
    traits, h, ffn = model.traits, model.hidden_size, model.ffn_hidden_size
    fused = traits.fused_qkv or traits.fused_gate_up or traits.conv1d or model.latent is not None
    if fused or not model.gated_mlp or model.is_encoder_decoder or model.approximate is not None:
        return {}
    query, key_value = model.query_width, model.key_value_width
    attention = {"q_proj": (h, query), "k_proj": (h, key_value), "v_proj": (h, key_value), "o_proj": (query, h)}
    mlp = {"gate_proj": (h, ffn), "up_proj": (h, ffn), "down_proj": (ffn, h)}
    return attention if model.num_experts else attention | mlp


def _of_layer(inputs: int, outputs: int, row_parallel: bool, tp: int) -> float:
    return inputs / tp + outputs if row_parallel else inputs + outputs / tp


@lru_cache(maxsize=64)
def adapter_parameters_of(model: ModelSpec, lora: LoraSpec, tp: int = 1) -> float:
    """Adapter parameters of the whole model on one of ``tp`` tensor-parallel ranks. Routed experts are one fused tensor
    and get none; shared experts do (kit/engines/huggingface/adapters.py, target_modules).

    Every rank has the whole A of a column-parallel layer, and the whole B of a row-parallel layer
    (kit/engines/megatron/model/adapted_linear.py).
    """
    if lora.target_modules or lora.rank_pattern:
        named = {name: widths for name, widths in named_layers(model).items() if name in lora.layers}
        ranks = (
            lora.rank_of(name) * _of_layer(*widths, name in ("o_proj", "down_proj"), tp)
            for name, widths in named.items()
        )
        return model.num_layers * sum(ranks)
    h, query, key_value = model.hidden_size, model.query_width, model.key_value_width

    def column(*outputs: int, inputs: int = h) -> float:
        return sum(inputs + each / tp for each in outputs)

    def mlp(width: int) -> float:
        first = (2 * width,) if model.traits.fused_gate_up else (width,) * (2 if model.gated_mlp else 1)
        return column(*first) + width / tp + h

    if model.latent is not None:
        latent, heads = model.latent, model.num_attention_heads
        down, width = latent.kv_lora_rank + latent.rope_head_dim, heads * latent.value_head_dim
        attention = h + down + column(heads * latent.nope_head_dim + width, inputs=latent.kv_lora_rank) + width / tp + h
        compressed = latent.q_lora_rank
        attention += h + compressed + column(query, inputs=compressed) if compressed else column(query)
    else:
        projections = (query + 2 * key_value,) if model.traits.fused_qkv else (query, key_value, key_value)
        attention = column(*projections) + query / tp + h
    if lora.targets == "attention":
        # peft selects modules by the last part of their name, and GPT-2 calls the output of attention and of the MLP
        # c_proj.
        also = model.ffn_hidden_size / tp + h if model.traits.conv1d else 0
        return lora.rank * model.num_layers * (attention + also)
    dense = model.first_dense_layers if model.num_experts else model.num_layers
    of_mlps = dense * mlp(model.ffn_hidden_size)
    if model.num_shared_experts:
        gate = h + 1 if model.traits.shared_expert_gate else 0
        of_mlps += (model.num_layers - dense) * (mlp(model.shared_ffn_hidden_size) + gate)
    return lora.rank * (model.num_layers * attention + of_mlps)
