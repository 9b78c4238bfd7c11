"""implementation=transformer_engine: megatron-core's own layers over Transformer Engine's kernels.

Transformer Engine's linear layers contain the norm before them. ``plain_name`` maps its parameter names to the names of
the weight maps.
"""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING

from kit.errors import EngineError

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

_PLAIN = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
    ".mtp_model_layer.": ".transformer_layer.",  # megatron-core 0.19; see versions.py
}


_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
"""A parameter of grouped experts: TEGroupedMLP numbers them (megatron-core, transformer/moe/experts.py)."""


def fused_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage's chunk. Raises EngineError if Transformer Engine is not installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise EngineError(
            "implementation=transformer_engine and it is not installed; pip install 'transformer-engine[pytorch]' "
            "beside torch's CUDA build, or use implementation=local"
        )
    # Not above: who reads a checkpoint's names needs no megatron-core, which takes seconds to import.
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


def plain_name(parameter: str) -> str:
    """The name that the same parameter has in the weight maps: with implementation=local and megatron-core 0.16."""
    for other, plain in _PLAIN.items():
        parameter = parameter.replace(other, plain)
    return _GROUPED.sub(r".experts.local_experts.\3.\1.\2", parameter)
