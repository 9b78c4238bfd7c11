"""Known keys of DeepSpeed and accelerate, from tables by scripts/deepspeed_keys.py and scripts/accelerate_keys.py."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kit.specs import strict_yaml


@dataclass(frozen=True)
class KnownKeys:
    """Keys of one reader."""

    reader: str
    """The package that reads them."""
    version: str
    effect: str
    """What the package does with an unknown key."""
    tree: Mapping[str, Any]
    """key → null (a value), ``any`` (any content), or the mapping of keys inside."""
    removed: frozenset[str] = frozenset()
    """Dotted keys that raise an exception."""
    deprecated: Mapping[str, str] = field(default_factory=dict)
    """Dotted key → the key that replaces it."""
    refuses: frozenset[str] = frozenset()
    """Sections in which an unknown key stops the run; the empty string is the top level."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """Dotted key → condition on its number, such as ``> 0`` or ``<= 1 and >= 0``."""

    def inside(self, path: tuple[str, ...]) -> Mapping[str, Any] | None:
        """The known keys of a section; None if the table does not describe the section."""
        node: Any = self.tree
        for step in path:
            node = node.get(step) if isinstance(node, Mapping) else None
        return node if isinstance(node, Mapping) else None


def near(word: str, known: Iterable[str]) -> str | None:
    """The known name that is most like a word; None if none is like it."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.75)), None)


def generated(name: str) -> Mapping[str, Any]:
    """A generated table, beside this file."""
    return strict_yaml.read(Path(__file__).with_name(name)).data


_EFFECTS = {
    "DeepSpeed": "ignored at the top level and in some sections, refused in others",
    "accelerate": "refused at the top level, ignored inside a section",
}
"""Package → what it does with a key that it does not know."""


@cache
def known_keys(reader: Literal["DeepSpeed", "accelerate"]) -> KnownKeys:
    """Keys of ``ds_config.json``, or of accelerate's YAML."""
    data = generated(f"{reader.lower()}_keys.yaml")
    return KnownKeys(
        reader=reader,
        version=str(data["version"]),
        effect=_EFFECTS[reader],
        tree=data["keys"],
        removed=frozenset(data.get("removed", ())),
        deprecated=data.get("deprecated", {}),
        refuses=frozenset(data.get("refuses", {""})),
        limits=data.get("limits", {}),
    )


@cache
def layer_classes() -> Mapping[str, frozenset[str]]:
    """Family of models → the classes of its modules in transformers; written by scripts/layer_classes.py."""
    return {family: frozenset(names) for family, names in generated("layer_classes.yaml")["families"].items()}


@dataclass(frozen=True)
class TrainerArguments:
    """Arguments of the Hugging Face Trainer; written by scripts/trainer_arguments.py."""

    version: str
    """Version of transformers."""
    defaults: Mapping[str, Any]
    dropped: frozenset[str]
    """Arguments of earlier versions, which the parser refuses."""


@cache
def trainer_arguments() -> TrainerArguments:
    data = generated("trainer_arguments.yaml")
    return TrainerArguments(str(data["version"]), data["defaults"], frozenset(data["dropped"]))
