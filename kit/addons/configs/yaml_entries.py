"""YAML and JSON: every value with its marks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from kit.addons.configs.entries import Entry, Source
from kit.errors import SpecError


def root_of(text: str, name: str) -> yaml.MappingNode:
    """The file's mapping as PyYAML's nodes, which have marks. Raises PyYAML's errors, and ``SpecError``."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        raise SpecError(f"{name}: no mapping of keys")
    return node


def read_yaml(text: str, name: str) -> Source:
    """The values of a YAML or JSON file, as its program's YAML 1.1 parser reads them; of two equal keys the last."""
    constructor = yaml.SafeLoader("")
    try:
        entries = dict(_leaves(root_of(text, name), constructor, ""))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(f"{name}: {' '.join(str(error).split())[:300]}") from None
    return Source(name, text, "json" if name.endswith(".json") else "yaml", entries)


def _leaves(node: yaml.MappingNode, constructor: Any, prefix: str) -> Iterator[tuple[str, Entry]]:
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _leaves(value, constructor, f"{dotted}.")
            continue
        plain = constructor.construct_object(value, deep=True)
        yield dotted, Entry(plain, key.start_mark.line + 1, value.start_mark.index, value.end_mark.index)
