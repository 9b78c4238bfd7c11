"""A file with some of its values changed, and nothing else: what ``kit plan FILE --patch`` prints."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
from collections.abc import Mapping
from functools import reduce
from typing import Any

import yaml

from kit.addons.configs.entries import Source, word
from kit.addons.configs.toml_entries import with_value
from kit.addons.configs.yaml_entries import root_of

_Edit = tuple[int, int, str]


def edited(source: Source, values: Mapping[str, Any]) -> str:
    """The file's text with these values: a value's own text is replaced, a new key comes after its last sibling. Of
    Python the flags of the command that starts the function."""
    if source.form == "python":
        return " ".join(_flag(source, key.replace("_", "-"), value) for key, value in _classes_last(values))
    if source.form == "toml":
        return reduce(lambda text, pair: with_value(text, *pair), values.items(), source.text)
    if source.form == "shell":
        edits = [_of_shell(source, key, value) for key, value in _classes_last(values)]
    else:
        root = root_of(source.text, source.name)
        edits = [_of_yaml(source, root, key, value) for key, value in values.items()]
    text, at = "", 0
    for begin, end, new in sorted(edits, key=lambda edit: edit[0]):
        text, at = text + source.text[at:begin] + new, end
    return text + source.text[at:]


def unified_diff(source: Source, path: str, values: Mapping[str, Any]) -> str:
    """What ``patch`` and ``git apply`` take; of a file that is not below this directory under its name alone. Of Python
    the flags."""
    before, after = source.text, edited(source, values)
    if source.form == "python":
        return f"{after}\n"
    name = os.path.relpath(path)
    name = os.path.basename(path) if name.startswith(os.pardir) else name
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _classes_last(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The class of a part has no dot in its key, and behind it tyro takes that part's flags alone."""
    return sorted(values.items(), key=lambda pair: "." not in pair[0])


def _flag(source: Source, key: str, value: Any) -> str:
    text = shlex.quote(word(value))
    if source.flags == "hydra":
        return f"{key}={text}"
    if source.flags == "tyro" and "." not in key:
        return f"{key.replace('_', '-')}:{text}"
    return f"--{key}" if source.flags and value is True else f"--{key} {text}"


def _of_shell(source: Source, key: str, value: Any) -> _Edit:
    """The word of the flag; a flag that is new, or whose value is a part of a variable, behind the last word, where it
    wins, and before a class."""
    entry = source.entries.get(key)
    if entry is not None and entry.start >= 0 and entry.value is not True:
        return entry.start, entry.end, shlex.quote(word(value))
    line = source.text.rfind("\n", 0, source.end) + 1
    indent = re.match(r"\s*", source.text[line:])
    dashes = re.search(r"\s--[\w.]+-\w+", source.text) is not None
    flag = _flag(source, key.replace("_", "-") if dashes else key, value)
    return source.end, source.end, f" \\\n{(indent[0] if indent else '') or '    '}{flag}"


def _of_yaml(source: Source, root: yaml.MappingNode, key: str, value: Any) -> _Edit:
    entry, steps = source.entries.get(key), key.split(".")
    if entry is not None:
        blank = "" if source.text[entry.start : entry.end] or source.text[entry.start - 1 : entry.start] == " " else " "
        return entry.start, entry.end, blank + _scalar(source, value)
    section = root
    while len(steps) > 1:
        inner = next((each for name, each in section.value if name.value == steps[0]), None)
        if not isinstance(inner, yaml.MappingNode) or not inner.value:
            break
        section, steps = inner, steps[1:]
    first, last = section.value[0][0], section.value[-1][1]
    indent = " " * first.start_mark.column
    if section.flow_style:
        apart = f"\n{indent}" if "\n" in source.text[section.start_mark.index : first.start_mark.index] else " "
        end = last.end_mark.index
        return (
            end,
            end,
            f",{apart}{json.dumps(steps[0]) if source.form == 'json' else steps[0]}: {_scalar(source, value)}",
        )
    empty = next((each for name, each in section.value if name.value == steps[0]), None)
    lines = [f"{indent}{'  ' * depth}{step}:" for depth, step in enumerate(steps)]
    lines[-1] += f" {_scalar(source, value)}"
    if empty is not None and len(steps) > 1:  # a section that is there, and has nothing in it
        return empty.start_mark.index, empty.end_mark.index, "\n" + "\n".join(lines[1:])
    end = len(source.text[: _end_of(last)].rstrip())
    end = max(end, source.text.find("\n", end) if "\n" in source.text[end:] else len(source.text))
    return end, end, "\n" + "\n".join(lines)


def _end_of(node: yaml.Node) -> int:
    """Where the last text of a node ends; a block's own mark is behind the comments that follow it."""
    while isinstance(node, yaml.MappingNode | yaml.SequenceNode) and node.value and not node.flow_style:
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    return int(node.end_mark.index)


def _scalar(source: Source, value: Any) -> str:
    return json.dumps(value) if source.form == "json" else word(value)
