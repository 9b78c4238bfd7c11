"""Which map belongs to which family."""

from __future__ import annotations

from kit.engines.megatron.weights import deepseek, gemma, gpt2, gpt_neox, gpt_oss, llama, moe, phi3, qwen2, qwen3
from kit.engines.megatron.weights.mapping import Entry
from kit.errors import EngineError
from kit.specs.model import ModelSpec

_MAPS = {
    "llama": llama.entries,
    "mistral": llama.entries,
    "qwen2": qwen2.entries,
    "qwen3": qwen3.entries,
    "phi3": phi3.entries,
    "gpt2": gpt2.entries,
    "mixtral": moe.mixtral,
    "qwen3_moe": moe.qwen3_moe,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3,
    "gpt_neox": gpt_neox.entries,
    "deepseek_v3": deepseek.deepseek_v3,
    "gpt_oss": gpt_oss.entries,
}


def weight_map(model: ModelSpec) -> tuple[Entry, ...]:
    """The entries of the model's family. Raises EngineError for a family without a map."""
    if model.family not in _MAPS:
        raise EngineError(
            f"family={model.family} of {model.name}: the Megatron engine has no weight map for it; "
            f"use engine torch or deepspeed, or one of the families {', '.join(_MAPS)}"
        )
    return _MAPS[model.family](model)
