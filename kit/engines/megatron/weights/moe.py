"""Mixtral and Qwen3-MoE: Llama's and Qwen3's layers with a router and experts in place of the MLP."""

from __future__ import annotations

from kit.engines.megatron.weights import llama
from kit.engines.megatron.weights.mapping import Entry
from kit.engines.megatron.weights.qwen3 import QK_NORMS
from kit.engines.megatron.weights.sharding import GatedRows, Replicated, Sliced
from kit.specs.model import ModelSpec

_WITHOUT_MLP = tuple(entry for entry in llama.LAYER if ".mlp." not in entry.megatron)


def experts(block: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """Names on disk below a layer: transformers' own fused parameters have others
    (kit/engines/huggingface/experts.py)."""
    megatron = "decoder.layers.{layer}.mlp."
    one = f"model.layers.{{layer}}.{block}.experts.{{expert}}"
    return (
        Entry(f"{megatron}router.weight", (f"model.layers.{{layer}}.{block}.gate.weight",), Replicated()),
        Entry(
            f"{megatron}experts.local_experts.{{expert}}.linear_fc1.weight",
            (f"{one}.{gate}.weight", f"{one}.{up}.weight"),
            GatedRows(),
        ),
        Entry(
            f"{megatron}experts.local_experts.{{expert}}.linear_fc2.weight", (f"{one}.{down}.weight",), Sliced(dim=1)
        ),
    )


_MIXTRAL = (*_WITHOUT_MLP, *experts("block_sparse_moe", "w1", "w3", "w2"))
_QWEN3_MOE = (*_WITHOUT_MLP, *QK_NORMS, *experts("mlp", "gate_proj", "up_proj", "down_proj"))


def mixtral(model: ModelSpec) -> tuple[Entry, ...]:
    """The whole map."""
    return llama.entries(model, _MIXTRAL)


def qwen3_moe(model: ModelSpec) -> tuple[Entry, ...]:
    """The whole map."""
    return llama.entries(model, _QWEN3_MOE)
