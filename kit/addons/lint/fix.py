"""Applies the changes of findings to a copy of a file. Findings without changes leave the file as it is."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.addons.lint.finding import REMOVE, Finding
from kit.errors import SpecError
from kit.files import write_text
from kit.specs import strict_yaml


def fixed(data: Mapping[str, Any], findings: Sequence[Finding]) -> dict[str, Any]:
    """A copy of the values with the changes of all findings."""
    return changed(data, [change for finding in findings for change in finding.changes])


def changed(data: Mapping[str, Any], changes: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """A copy with these values of keys, or without these keys."""
    result = copy.deepcopy(dict(data))
    for (*sections, key), value in changes:
        node = result
        for section in sections:
            inner = node[section] if isinstance(node.get(section), dict) else {}
            if value is not REMOVE:
                node[section] = inner
            node = inner
        if value is REMOVE:
            node.pop(key, None)
        else:
            node[key] = value
    return result


def write_fixed(data: Mapping[str, Any], findings: Sequence[Finding], target: Path) -> None:
    """Write a corrected copy, JSON or YAML by the name's ending. An existing file is not overwritten."""
    values = fixed(data, findings)
    text = strict_yaml.dump(values) if target.suffix in (".yaml", ".yml") else json.dumps(values, indent=2) + "\n"
    try:
        write_text(target, text, overwrite=False)
    except FileExistsError:
        raise SpecError(f"{target} exists already and is not overwritten; choose another name") from None
    except OSError as error:
        raise SpecError(f"{target} cannot be written: {error.strerror}") from None
