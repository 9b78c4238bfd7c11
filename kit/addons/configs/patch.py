"""A file with some of its values changed, and nothing else: what ``kit plan FILE --patch`` prints."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from kit.addons.configs.entries import Edit, Source, word
from kit.addons.configs.reading import source_of
from kit.addons.configs.toml_entries import new_of_toml, toml_word
from kit.addons.configs.yaml_entries import root_of


def edited(source: Source, values: Mapping[str, Any]) -> str:
    """The file's text with these values: a value's own text is replaced, a new key comes after its last sibling. Of
    Python the flags of the command that starts the function. Raises ``SpecError`` where a new text is not read."""
    # the class of a part has no dot in its key, and behind it tyro takes that part's flags alone
    ordered = sorted(values, key=lambda key: "." not in key) if source.command else values
    if source.form == "python":
        return " ".join(_flag(source, key.replace("_", "-"), values[key]) for key in ordered)
    for key in ordered:
        begin, end, new = _edit(source, key, values[key])
        source, _ = source_of(source.text[:begin] + new + source.text[end:], source.name)
    return source.text


def _edit(source: Source, key: str, value: Any) -> Edit:
    """In the place of the text that the value has; behind the key's siblings where it has none of its own."""
    entry, written = source.entries.get(key), _WRITTEN[source.form](value)
    if entry is None or entry.start < 0:
        return _NEW[source.form](source, key, value)
    blank = " " if source.form == "yaml" and source.text[entry.start - 1 : entry.end] == ":" else ""
    return entry.start, entry.end, blank + written


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


def _flag(source: Source, key: str, value: Any) -> str:
    text = shlex.quote(word(value))
    if source.flags == "hydra":
        return f"{key}={text}"
    if source.flags == "tyro" and "." not in key:
        return f"{key.replace('_', '-')}:{text}"
    return f"--{key}" if source.flags and value is True else f"--{key} {text}"


def _new_flag(source: Source, key: str, value: Any) -> Edit:
    """Behind the last word, where it wins over a value that is a part of a variable, and before a class."""
    indent = re.match(r"\s*", source.text[: source.end].rpartition("\n")[2])
    dashes = re.search(r"\s--[\w.]+-\w+", source.text) is not None
    flag = _flag(source, key.replace("_", "-") if dashes else key, value)
    return source.end, source.end, f" \\\n{(indent[0] if indent else '') or '    '}{flag}"


def _new_of_yaml(source: Source, key: str, value: Any) -> Edit:
    """In the innermost section of the key that is there and has something in it."""
    inner: yaml.Node | None = root_of(source.text, source.name)
    steps = ["", *key.split(".")]
    while isinstance(inner, yaml.MappingNode) and inner.value and len(steps) > 1:
        section, steps = inner, steps[1:]
        inner = next((each for name, each in section.value if name.value == steps[0]), None)
    first, last = section.value[0][0], section.value[-1][1]
    indent = " " * first.start_mark.column
    if section.flow_style:
        apart = f"\n{indent}" if "\n" in source.text[section.start_mark.index : first.start_mark.index] else " "
        name = json.dumps(steps[0]) if source.form == "json" else steps[0]
        return last.end_mark.index, last.end_mark.index, f",{apart}{name}: {_WRITTEN[source.form](value)}"
    lines = [f"{indent}{'  ' * depth}{step}:" for depth, step in enumerate(steps)]
    lines[-1] += f" {_WRITTEN[source.form](value)}"
    if inner is not None and len(steps) > 1:  # a section that is there, and has nothing in it
        return inner.start_mark.index, inner.end_mark.index, "\n" + "\n".join(lines[1:])
    end = len(source.text[: _end_of(last)].rstrip())
    end = max(end, source.text.find("\n", end) if "\n" in source.text[end:] else len(source.text))
    return end, end, "\n" + "\n".join(lines)


def _end_of(node: yaml.Node) -> int:
    """Where the last text of a node ends; a block's own mark is behind the comments that follow it."""
    while isinstance(node, yaml.MappingNode | yaml.SequenceNode) and node.value and not node.flow_style:
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    return int(node.end_mark.index)


_WRITTEN: Mapping[str, Callable[[Any], str]] = {
    "yaml": word,
    "json": json.dumps,
    "toml": toml_word,
    "shell": lambda value: shlex.quote(word(value)),
}
"""A file's form → its text of a value."""
_NEW: Mapping[str, Callable[[Source, str, Any], Edit]] = {
    "yaml": _new_of_yaml,
    "json": _new_of_yaml,
    "toml": new_of_toml,
    "shell": _new_flag,
}
"""A file's form → the edit that gives it a key that it has not."""
