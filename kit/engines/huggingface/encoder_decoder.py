"""Special cases of encoder-decoders in transformers: T5's tied weights, and copies of tensors in old files."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from transformers import T5Config, T5ForConditionalGeneration

from kit.engines.io.sharded_safetensors import SafetensorsSource
from kit.errors import CheckpointError


class UntiedT5(T5ForConditionalGeneration):
    """T5 1.1, with an untied head and one embedding for both stacks.

    transformers' class ties the head to the embedding unless the files have both tensors. With
    tie_word_embeddings=false it also unties the embeddings of the two stacks (modeling_t5.py, _tied_weights_keys).
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {  # type: ignore[misc] # transformers leaves ClassVar out
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }

    def __init__(self, config: T5Config) -> None:
        config = copy.deepcopy(config)
        config.tie_word_embeddings = True
        super().__init__(config)


def drop_copies(names: dict[str, Any]) -> None:
    """Remove, in place, the names of each stack's copy of the embedding and of the constant that is added to logits."""
    for prefix in ("", "model."):
        for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", _LOGITS_BIAS):
            names.pop(prefix + name, None)
    # Old files of T5 also have this; modeling_t5.py ignores it (_keys_to_ignore_on_load_unexpected).
    names.pop("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", None)


def check_logits_bias(directory: Path, files: Mapping[str, Path]) -> None:
    """Raises CheckpointError if BART's buffer final_logits_bias, which is not trained, is not zero."""
    if _LOGITS_BIAS in files and SafetensorsSource(files).read(_LOGITS_BIAS).any():
        raise CheckpointError(
            f"{directory} adds a constant to its logits (final_logits_bias is not zero), which is not trained here; "
            "use a model without"
        )


_LOGITS_BIAS = "final_logits_bias"
