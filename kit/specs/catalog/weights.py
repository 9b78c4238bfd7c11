"""Where the weights of a named model are."""

from __future__ import annotations

import os
import re

from kit.specs.catalog.models import load_model
from kit.specs.catalog.rows import rows
from kit.specs.hub import is_elsewhere


def weights_of(model: str) -> str | None:
    """A model's directory, or its id on the hub; None for a mere size, and for a directory without weights. Raises
    SpecError for an unknown name."""
    if os.path.isdir(model):
        return model if any(name.endswith(".safetensors") for name in os.listdir(model)) else None
    if is_elsewhere(model):
        return model
    source = rows("models").get(load_model(model).name, {}).get("source", "")
    found = re.search(r"huggingface\.co/([\w.-]+/[\w.-]+)", source)
    return found and found[1]
