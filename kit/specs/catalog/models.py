"""A model's name or directory → its shape."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.catalog.rows import rows
from kit.specs.model import ModelSpec
from kit.specs.text import nearest, shown


def model_names() -> list[str]:
    """Every model of the catalog."""
    return list(rows("models"))


def load_model(name_or_path: str | Path) -> ModelSpec:
    """A catalog name in any case (``llama-3.1-8b``, also as a hub id), a directory with config.json (or that file), or
    a size (``13B``), for which a shape is made.

    Raises ``SpecError`` with the nearest names, or with what a config.json lacks.
    """
    name, path = str(name_or_path), Path(name_or_path)
    key = name.rsplit("/", 1)[-1].lower()
    if path.name == "config.json" and os.path.isfile(path):
        path = path.parent
    if os.path.isfile(path / "config.json") or (key not in rows("models") and name and os.path.isdir(path)):
        from kit.specs.huggingface import read_config  # most plans are of a model of the catalog

        return read_config(path)  # says what is missing
    if key not in rows("models"):
        from kit.specs.sizes import is_size, shape_of_size

        if is_size(name):
            return shape_of_size(name)
        raise SpecError(
            f"model {shown(name)} is neither in the catalog, nor a directory, nor a size such as 13B; "
            f"{nearest(key, model_names())}"
        )
    return _catalog_model(key)


@cache
def _catalog_model(key: str) -> ModelSpec:
    document = strict_yaml.Document(name="models.yaml", data={}, lines={})
    return strict_yaml.parse(ModelSpec, {"name": key, **rows("models")[key]}, document, (key,))
