"""Parameters of LoRA's adapters (arXiv 2106.09685, section 4): r·(inputs + outputs) for every adapted matrix."""

from __future__ import annotations

from functools import lru_cache

from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec


@lru_cache(maxsize=64)
def adapter_parameters_of(model: ModelSpec, lora: LoraSpec) -> float:
    """Adapter parameters of a whole Hugging Face model, by its linear layers. Routed experts are one fused tensor and
    get none; shared experts do (kit/engines/huggingface/adapters.py, target_modules)."""
    h, query, key_value = model.hidden_size, model.query_width, model.key_value_width
    if model.latent is not None:
        sizes = _latent(model)
    elif model.traits.fused_qkv:
        sizes = [(h, query + 2 * key_value), (query, h)]
    else:
        sizes = [(h, query), (h, key_value), (h, key_value), (query, h)]
    attention = sum(map(sum, sizes)) * model.num_layers
    if lora.targets == "attention":
        # peft selects modules by the last part of their name, and GPT-2 calls the output of attention and of the MLP
        # c_proj.
        also = model.num_layers * (model.ffn_hidden_size + h) if model.traits.conv1d else 0
        return float(lora.rank * (attention + also))
    dense = model.first_dense_layers if model.num_experts else model.num_layers
    mlp = dense * _mlp(model, model.ffn_hidden_size)
    if model.num_shared_experts:
        gate = h + 1 if model.traits.shared_expert_gate else 0
        mlp += (model.num_layers - dense) * (_mlp(model, model.shared_ffn_hidden_size) + gate)
    return float(lora.rank * (attention + mlp))


def _mlp(model: ModelSpec, width: int) -> int:
    h = model.hidden_size
    if model.traits.fused_gate_up:
        return (h + 2 * width) + (width + h)  # gate and up are one
    return (3 if model.gated_mlp else 2) * (h + width)


def _latent(model: ModelSpec) -> list[tuple[int, int]]:
    latent, heads, h = model.latent, model.num_attention_heads, model.hidden_size
    assert latent is not None
    query = heads * (latent.nope_head_dim + latent.rope_head_dim)
    up = heads * (latent.nope_head_dim + latent.value_head_dim)
    first = [(h, query)] if latent.q_lora_rank is None else [(h, latent.q_lora_rank), (latent.q_lora_rank, query)]
    down = (h, latent.kv_lora_rank + latent.rope_head_dim)
    return [*first, down, (latent.kv_lora_rank, up), (heads * latent.value_head_dim, h)]
