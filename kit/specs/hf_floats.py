"""Infinity and NaN in a ``config.json``, which JSON cannot hold. transformers 5 writes ``{"__float__": "Infinity"}``
(configuration_utils.py, _encode_special_floats), earlier versions the bare word. Specs keep the former."""

from __future__ import annotations

from typing import Any

_TAG = "__float__"
_WORDS = ("Infinity", "-Infinity", "NaN")


def tagged(word: str) -> dict[str, str]:
    """For ``json.loads(parse_constant=…)``: the bare word as transformers 5 writes it."""
    return {_TAG: word}


def decoded(value: Any) -> Any:
    """Plain values as transformers reads them: tags are floats."""
    if isinstance(value, list):
        return [decoded(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TAG} and value[_TAG] in _WORDS:
        return float(value[_TAG])
    return {key: decoded(inner) for key, inner in value.items()}
