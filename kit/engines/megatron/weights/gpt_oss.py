"""gpt-oss: Llama with biases everywhere, a sink a head, a router with a bias, and experts with biases."""

from __future__ import annotations

from kit.engines.megatron.weights import llama
from kit.engines.megatron.weights.mapping import Entry
from kit.engines.megatron.weights.moe import experts
from kit.engines.megatron.weights.qwen2 import QKV_BIAS
from kit.engines.megatron.weights.sharding import GatedRows, Replicated, Rule, Sliced
from kit.specs.model import ModelSpec

_LAYER, _BLOCK = "decoder.layers.{layer}.", "model.layers.{layer}."


def _entry(megatron: str, *hugging_face: str, rule: Rule) -> Entry:
    return Entry(f"{_LAYER}{megatron}", tuple(f"{_BLOCK}{name}" for name in hugging_face), rule)


_ONE, _OURS = "mlp.experts.{expert}", "mlp.experts.local_experts.{expert}"
_ALL = (
    *(entry for entry in llama.LAYER if ".mlp." not in entry.megatron),
    QKV_BIAS,
    _entry("self_attention.linear_proj.bias", "self_attn.o_proj.bias", rule=Replicated()),
    _entry("self_attention.core_attention.sinks", "self_attn.sinks", rule=Sliced(0)),
    _entry("mlp.router.weight", "mlp.router.weight", rule=Replicated()),
    _entry("mlp.router.bias", "mlp.router.bias", rule=Replicated()),
    *experts("mlp", "gate_proj", "up_proj", "down_proj")[1:],
    _entry(f"{_OURS}.linear_fc1.bias", f"{_ONE}.gate_proj.bias", f"{_ONE}.up_proj.bias", rule=GatedRows()),
    _entry(f"{_OURS}.linear_fc2.bias", f"{_ONE}.down_proj.bias", rule=Replicated()),
)


def entries(model: ModelSpec) -> tuple[Entry, ...]:
    """The whole map; of experts as kit names them (kit/engines/huggingface/fused_experts.py)."""
    return llama.entries(model, _ALL)
