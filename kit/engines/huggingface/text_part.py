"""The text part of a model of text and images: its configuration, and its weights under the names of the text model.

transformers saves such models in three ways, and this reads all: ``language_model.model.…`` (Gemma 3, LLaVA, Mistral 3,
Llama 4), ``model.language_model.…`` or ``model.text_model.…`` beside ``lm_head`` (Qwen3-VL, Idefics3), and the text
model's own names beside ``visual.…`` (Qwen2.5-VL).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kit.specs.huggingface import text_part

_PREFIXES = {"language_model.": "", "model.language_model.": "model.", "model.text_model.": "model."}
"""Beginning of a stored name → what the text model has in its place."""


def of_text(config: Mapping[str, Any], names: Iterable[str]) -> tuple[Mapping[str, Any], dict[str, str]]:
    """(configuration of the text part, name in the text model → stored name). Of a text model both are as they are.

    Weights of the other parts are left out.
    """
    inner, stored = text_part(config), list(names)
    if inner is None:
        return config, {name: name for name in stored}
    old = next((old for old in _PREFIXES if any(name.startswith(old) for name in stored)), "model.")
    new = _PREFIXES.get(old, "model.")
    renamed = {new + name.removeprefix(old): name for name in stored if name.startswith(old)}
    return inner, renamed | {name: name for name in stored if name.startswith("lm_head.")}
