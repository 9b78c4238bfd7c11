"""The tables of programs' keys: what each key means to kit. A table is data, one YAML file below ``tables``.

    keys:
      gradient_checkpointing:
        field: layout.recompute        # kit's field that the value decides
        default: false                 # what the program takes where the file is silent
        values: {"true": full, "false": none}      # the program's value → kit's; without: the value itself
        sets: {offload: {layout.activation_offloading: true}}   # a value that decides other fields too
        gap: {"*": [most, why]}        # values that kit does not model: the answer is a bound, at most or at least
        refuse: {lomo: why}            # values without an answer
      model.flavor:
        after: model.name              # it means something with another key alone: the value is "llama3 8B"
    file:                              # the file that kit writes: key → "always", "on" (unless it is off), or its value
      gradient_checkpointing: always

A pattern is a value as YAML writes it, with ``*`` for any that is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kit.addons.configs.entries import word
from kit.specs import strict_yaml
from kit.specs.extra import merged
from kit.specs.validation import FrozenMap, spec

Bound = Literal["most", "least"]
"""The true figure is at most kit's, or at least."""
OFF = frozenset({"null", "false", "none", "no", "off", "0", "1", "[]", "{}"})
"""Values with which a feature is off; 1 is a size that splits nothing."""
_FOLDER = Path(__file__).with_name("tables")


@spec
class Row:
    """What one key of a program means."""

    field: str = ""
    after: str = ""
    default: Any = None
    values: dict[str, Any] = FrozenMap({})
    sets: dict[str, dict[str, Any]] = FrozenMap({})
    gap: dict[str, tuple[Bound, str] | None] = FrozenMap({})
    """None: nothing is left out, whatever a later pattern says."""
    refuse: dict[str, str] = FrozenMap({})
    kind: Literal["", "list", "names", "deepspeed", "accelerate"] = ""
    """list: layers. names: other names. deepspeed, accelerate: that program's file, or one of ``named``; its table is
    ``_deepspeed.yaml``."""
    named: dict[str, dict[str, Any]] = FrozenMap({})
    """Files that the program brings: name → its ``zero_optimization``."""


@spec
class Table:
    """One program's keys, or those of one of its forms."""

    program: str
    """As ``kit.specs.other_programs`` calls it."""
    has: tuple[str, ...] = ()
    """Keys of which one is in a file of this form, where a program has several."""
    commands: tuple[str, ...] = ()
    """Words that start it in a script."""
    flags: Literal["", "switches", "tyro", "hydra"] = ""
    """How a command writes them. switches: one that is on has no value. tyro: so too, and a class is ``part:class``, at
    the end. hydra: ``key=value``."""
    extends: str = ""
    target: str = ""
    """Name of ``kit emit --target`` whose names of settings are recorded."""
    always: dict[str, Any] = FrozenMap({})
    """kit's fields that the program decides whatever the file says."""
    keys: dict[str, Row]
    inert: tuple[str, ...] = ()
    """Keys, or whole sections, that decide neither memory nor speed, beside those that are recorded."""
    complete: bool = False
    """Whether ``keys`` and ``inert`` are all that the program has: another key is a typo without ``target`` too."""
    choices: dict[str, tuple[Any, ...]] = FrozenMap({})
    """Keys that a change may use, and the values to try."""
    batch: tuple[str, ...] = ()
    """Keys of the micro batch, and of gradient accumulation where the program counts it."""
    file: dict[str, Any] = FrozenMap({})
    """Keys of the file that ``kit emit --target`` writes, in its order (``writing.py``)."""


def matched(patterns: Mapping[str, Any], value: Any) -> Any:
    """What a mapping by patterns has for a value; None if it has nothing."""
    text = word(value).lower()
    known = ((pattern.lower(), found) for pattern, found in patterns.items() if pattern != "*" or text not in OFF)
    return next((found for pattern, found in known if fnmatchcase(text, pattern)), None)


def names(row: Row, value: Any) -> bool:
    """Whether a row has a word for a value, beside one for all that are on."""
    patterns = {*row.values, *row.sets, *row.gap, *row.refuse} - {"*"}
    return matched(dict.fromkeys(patterns, True), value) is not None


@cache
def tables() -> tuple[Table, ...]:
    """Every table, in the order of the files' names."""
    return tuple(_parsed(path) for path in sorted(_FOLDER.glob("[!_]*.yaml")))


@cache
def table_of_kind(kind: str) -> Table:
    """The table for the files of another program that a row of this ``kind`` names."""
    return _parsed(_FOLDER / f"_{kind}.yaml")


def _parsed(path: Path) -> Table:
    document = strict_yaml.read(path)
    data, base = document.data, document.data.get("extends", "")
    data = merged(strict_yaml.read(path.with_name(f"{base}.yaml")).data, data) if base else data
    return strict_yaml.parse(Table, data, document)


def table_of(keys: set[str], program: str = "", command: str = "") -> Table | None:
    """The table for a program's file with these top-level keys, or for what a script starts."""
    mine = [each for each in tables() if each.program == program or command in each.commands]
    forms = [each for each in mine if each.has and keys & set(each.has)]
    return next(iter(forms or [each for each in mine if not each.has] or mine), None)
