"""State of the page, as its link stores it: the keys and values of a recipe.

``?model=llama-3.1-8b&cluster=8xH100&job.seq_length=8192&layout.engine=megatron`` is a state of the page. ``text`` is a
pasted recipe or config.json, compressed; ``pin`` names one of the layouts that were compared. A link names no file: a
model and a cluster are names of the catalog, or labels of what ``kit ui`` was started with.
"""

from __future__ import annotations

import base64
import binascii
import os
import shlex
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.families import FAMILIES
from kit.specs.huggingface import model_from_config
from kit.specs.recipe import Recipe, load_recipe, recipe_of_document
from kit.specs.text import shown
from kit.specs.text_files import MOST_BYTES, parse_json

MOST_OF_A_LINK = 24_000
"""Characters of a pasted text in a link, compressed; servers take 64 kB of headers."""
_MOST_CHANGES, _LONGEST_VALUE = 60, 2000
_PASTED = "pasted text"
Offered = Mapping[str, Mapping[str, Any]]
"""Label of a file that ``kit ui`` was started with → the sections of a recipe that it gives."""


@dataclass(frozen=True)
class State:
    """Inputs of the page."""

    changes: tuple[tuple[str, str], ...] = (("model", "llama-3.1-8b"), ("cluster", "8xH100"))
    """Keys of a recipe and their values, as arguments of ``kit plan RECIPE`` have them."""
    text: str = ""
    """A pasted recipe or config.json; ``changes`` are laid over it."""
    pin: str = ""
    """``describe`` of the layout that is pinned; empty: the planner chooses."""

    def get(self, key: str) -> str:
        """The value of a change; empty without one."""
        return dict(self.changes).get(key, "")

    def having(self, key: str, value: str) -> State:
        """The state with another value of a key; an empty one removes the change. Drops the pin, or sets it."""
        if key == "pin":
            return replace(self, pin=value)
        kept = {name: said for name, said in (dict(self.changes) | {key: value}).items() if said}
        return State(tuple(kept.items()), "" if key == "model" else self.text)

    def pasting(self, text: str) -> State:
        """The state with a pasted text. A config.json replaces only the model, a recipe everything."""
        config = text.lstrip().startswith("{")
        kept = (change for change in self.changes if config and change[0].startswith(("cluster", "job.")))
        return State(tuple(kept), text)

    def query(self) -> str:
        """The link's query. Raises ``SpecError`` if the text is too long for a link."""
        items = [*self.changes, ("text", _packed(self.text)), ("pin", self.pin)]
        return urlencode([(key, value) for key, value in items if value])

    @classmethod
    def of_query(cls, items: Iterable[tuple[str, str]]) -> State:
        """The state of a link. Raises ``SpecError``."""
        pairs = list(items)
        values = dict(pairs)
        if len(values) < len(pairs) or len(pairs) > _MOST_CHANGES:
            raise SpecError(
                f"this link has {len(pairs)} values; use each key once, and at most {_MOST_CHANGES} of them"
            )
        text, pin = _unpacked(values.pop("text", "")), values.pop("pin", "")
        for key, value in values.items():
            if len(key + value) > _LONGEST_VALUE:
                raise SpecError(
                    f"{key[:40]} has {len(value)} characters; a link's values have at most {_LONGEST_VALUE}"
                )
        return cls(tuple(values.items()), text, pin) if values or text else replace(cls(), pin=pin)

    @classmethod
    def of_files(cls, offered: Offered) -> State:
        """The state that ``kit ui FILE …`` opens with: the first recipe or model, the first cluster."""
        changes = dict(cls().changes)
        for label, sections in reversed(list(offered.items())):
            changes |= {"model" if "model" in sections else "cluster": label}
        if "cluster" in offered.get(changes["model"], {}) and changes["cluster"] not in offered:
            del changes["cluster"]  # the recipe has its own
        return cls(tuple(changes.items()))

    def command(self, offered: Offered) -> str:
        """The command that prints the same plan, where the page was started; empty for a pasted text, a pinned layout
        and a file of another directory."""
        changes = dict(self.changes)
        model, cluster = changes.pop("model", ""), changes.pop("cluster", "")
        elsewhere = any(label in offered and not os.path.exists(label) for label in (model, cluster))
        has_its_own = "cluster" in offered.get(model, {})
        if self.text or self.pin or elsewhere or not model or not (has_its_own or cluster):
            return ""
        words = [f"cluster={cluster}"] * bool(cluster) if has_its_own else ["--gpus", cluster]
        return shlex.join(["kit", "plan", model, *words, *(f"{key}={value}" for key, value in changes.items())])

    def recipe(self, offered: Offered) -> Recipe:
        """The recipe that the page plans. Raises ``SpecError``."""
        document = _parsed(self.text) if self.text.strip() else strict_yaml.Document(name="link", data={}, lines={})
        data, changes = dict(document.data), dict(self.changes)
        for key in ("model", "cluster"):
            if (label := changes.get(key)) in offered:
                data |= offered[changes.pop(key)] if label else {}
        document = replace(document, data=data)
        return recipe_of_document(document, [f"{key}={value}" for key, value in changes.items()])


def offer(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Read the files that ``kit ui`` was started with: recipes, clusters (YAML) and directories of models.

    Raises ``SpecError``.
    """
    return {path.resolve().name: _sections(path) for path in paths}


def _sections(path: Path) -> dict[str, Any]:
    """The sections of a recipe that a file gives."""
    if path.suffix not in (".yaml", ".yml"):
        return {"model": strict_yaml.to_plain(load_model(path))}
    if {"model", "extends"} & strict_yaml.read(path).data.keys():
        recipe = load_recipe(path)
        return {key: strict_yaml.to_plain(getattr(recipe, key)) for key in ("model", "cluster", "job", "layout")}
    return {"cluster": strict_yaml.to_plain(parse_cluster(str(path)))}


def _parsed(text: str) -> strict_yaml.Document:
    """A pasted recipe, or the model of a pasted config.json. Of a type that kit does not describe only the text part
    is read: to approximate a type, kit asks transformers in a process of its own."""
    if len(text) > MOST_BYTES:
        raise SpecError(f"{_PASTED} has {len(text)} characters; paste at most {MOST_BYTES}")
    if not text.lstrip().startswith("{"):
        return strict_yaml.parse_text(text, _PASTED)
    try:
        config = parse_json(text)
    except ValueError as error:
        raise SpecError(f"{_PASTED}: not valid JSON: {error}") from None
    if config.get("model_type") not in FAMILIES and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if config.get("model_type") not in FAMILIES:
        raise SpecError(
            f"{_PASTED}: model_type={shown(config.get('model_type'))} is not a family that kit describes; to plan it "
            "approximately, name its directory: kit ui DIRECTORY"
        )
    model = model_from_config(config, name="pasted-model", source=_PASTED)
    return strict_yaml.Document(name=_PASTED, data={"model": strict_yaml.to_plain(model)}, lines={})


def _packed(text: str) -> str:
    packed = base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode() if text else ""
    if len(packed) > MOST_OF_A_LINK:
        raise SpecError(
            f"{_PASTED} takes {len(packed)} characters of the link; at most {MOST_OF_A_LINK} fit: leave out what is "
            "not about shapes, such as id2label, or name its directory: kit ui DIRECTORY"
        )
    return packed


def _unpacked(packed: str) -> str:
    try:
        reader = zlib.decompressobj()
        text = reader.decompress(base64.urlsafe_b64decode(packed), MOST_BYTES).decode() if packed else ""
    except (ValueError, binascii.Error, zlib.error):
        raise SpecError("the text in this link is damaged; copy the link again, or paste the text anew") from None
    if packed and not reader.eof:
        raise SpecError(f"the text in this link is cut off, or longer than {MOST_BYTES} bytes; paste the text anew")
    return text
