"""Model name or directory → ModelSpec, and where its weights are."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from kit.errors import SpecError
from kit.specs.catalog.rows import rows
from kit.specs.hub import is_elsewhere, is_id
from kit.specs.model import Approximation, LatentAttention, ModelSpec
from kit.specs.text import listed, nearest, shown
from kit.specs.validation import FrozenMap, trusted


def model_names() -> list[str]:
    """Every model of the catalog."""
    return list(rows("models"))


def described_names() -> list[str]:
    """Names of the catalog models whose family kit describes."""
    return [name for name, row in rows("models").items() if "approximate" not in row]


def load_model(name_or_path: str | Path) -> ModelSpec:
    """The model of a directory with config.json (or that file); of a catalog name in any common spelling
    (``llama-3.1-8b``, ``llama3.1-8b``, ``Qwen/Qwen3-8B-Base``); of a hub id, whose config.json is in the hub's cache
    on this disk or is fetched; or of a size (``13B``), for which kit makes a shape.

    Raises ``SpecError`` with similar names, or with the missing keys of a config.json.
    """
    name, path = str(name_or_path), Path(name_or_path)
    key = name.rsplit("/", 1)[-1].lower()
    if path.name == "config.json" and os.path.isfile(path):
        path = path.parent
    if os.path.isfile(path / "config.json") or (key not in rows("models") and name and os.path.isdir(path)):
        from kit.specs.huggingface import read_config  # most plans are of a model of the catalog

        return read_config(path)  # says what is missing
    if key not in rows("models") and len(_written(key)) != 1 and "/" in name:
        from kit.specs import huggingface

        if is_id(name):
            try:
                return huggingface.model_of_hub(name)
            except SpecError as error:
                raise SpecError(f"{error}; of the catalog {_similar(key)}") from None
    return model_called(name)


def model_called(name: str) -> ModelSpec:
    """The model of a catalog name in any common spelling, or of a size; reads no file. Raises ``SpecError`` with
    similar names."""
    key = name.rsplit("/", 1)[-1].lower()
    if key not in rows("models"):
        from kit.specs.sizes import is_size, shape_of_size

        if is_size(name):
            return shape_of_size(name)
        near = _written(key) or ([] if "/" in name else _near(key))
        if len(near) != 1:
            raise SpecError(
                f"model {shown(name)} is neither in the catalog, nor a directory with the config.json of any model of "
                f"the hub, nor an id of the hub (ORG/NAME), nor a size such as 13B; {_similar(key)}"
            )
        key = near[0]
    return _catalog_model(key)


def weights_of(model: str) -> str | None:
    """A model's directory, or its id on the hub; None for a mere size, and for a directory without weights. Raises
    SpecError for an unknown name."""
    if os.path.isdir(model):
        return model if any(name.endswith(".safetensors") for name in os.listdir(model)) else None
    if "/" in model and is_elsewhere(model):
        return model
    source = rows("models").get(load_model(model).name, {}).get("source", "")
    found = re.search(r"huggingface\.co/([\w.-]+/[\w.-]+)", source)
    return found and found[1]


_COPY = re.compile(
    r"(^|[-_. ])(unsloth|dynamic|linearized|quantized|gguf|awq|gptq|bnb|nf4|mxfp4|nvfp4|fp8|fp16|bf16|[48]bit|int[48]|"
    r"w\da\d+)(?=$|[-_. ])"
)
"""Words of the names of copies in another format: the shape is that of the model."""
_TUNED = re.compile(r"(^|[-_. ])(meta|base|instruct|chat|hf|it|pt|thinking|reasoning|deduped)(?=$|[-_. ])")
"""Words of a model name that do not change the model's shape."""


def _plain(name: str) -> str:
    """Letters and digits of a name, without words that do not change the shape."""
    return re.sub(r"[^a-z0-9]", "", _TUNED.sub(r"\1", _COPY.sub(r"\1", name)))


@cache
def _spellings() -> dict[str, frozenset[str]]:
    """Catalog name → its own plain name, and those of the repositories in its source."""
    hub = r"huggingface\.co/[^/\s]+/([^/\s;,]+)"
    return {
        name: frozenset({_plain(name), *(_plain(found.lower()) for found in re.findall(hub, row["source"]))})
        for name, row in rows("models").items()
    }


def _written(word: str) -> list[str]:
    """Catalog names that equal ``word`` (or whose repository does), apart from dashes, dots and words such as
    Instruct."""
    wanted = _plain(word[:100].lower())
    same = [name for name, known in _spellings().items() if wanted in known]
    return [name for name in same if _plain(name) == wanted] or same


def _near(word: str) -> list[str]:
    """Catalog names that begin with ``word``, or that have its numbers and similar letters."""
    from difflib import SequenceMatcher  # only a name that is not in the catalog needs it

    def figures(name: str) -> list[str]:
        return re.findall(r"\d+", name)

    if begun := [name for name in _spellings() if name.startswith(f"{word}-")]:
        return begun
    wanted = _plain(word[:100].lower())
    alike = {name: SequenceMatcher(None, _plain(name), wanted).ratio() for name in _spellings()}
    return [name for name, ratio in alike.items() if ratio > 0.85 and figures(_plain(name)) == figures(wanted)]


def _similar(key: str) -> str:
    near = _written(key) or _near(key)
    return f"did you mean {listed(near, ' or ')}?" if near else nearest(key, model_names())


@cache
def _catalog_model(key: str) -> ModelSpec:
    row = rows("models")[key]
    own: dict[str, Any] = {}
    if scaling := row.get("rope_scaling"):
        own["rope_scaling"] = FrozenMap(scaling)
    if latent := row.get("latent"):
        own["latent"] = trusted(LatentAttention, latent)
    if known := row.get("approximate"):
        own["approximate"] = trusted(Approximation, {**known, "config": FrozenMap(known["config"])})
    return trusted(ModelSpec, {"name": key, **row, **own})
