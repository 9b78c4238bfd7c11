"""A path → the file's values and the table of its program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kit.addons.configs.entries import Source
from kit.addons.configs.linked import READERS, opener, unopened
from kit.addons.configs.shell_entries import read_shell
from kit.addons.configs.tables import Table, table_of, tables
from kit.addons.configs.walk import Opened, walk
from kit.addons.configs.workload import Described, described
from kit.addons.configs.yaml_entries import read_yaml
from kit.addons.lint.config_files import SCRIPTS, text_of
from kit.errors import SpecError
from kit.specs.catalog import load_model, model_called
from kit.specs.cluster import ClusterSpec
from kit.specs.other_programs import advice, model_named, program_of

_loaded, _called = lru_cache(load_model), lru_cache(model_called)


def source_of(text: str, name: str) -> tuple[Source, Table]:
    """The values of a file's text, and its program's table. A Python file's name may end with that of a function, as
    ``config_registry.py::llama3_8b``. Raises ``SpecError`` where kit knows neither."""
    ending = Path(name.partition("::")[0]).suffix
    source = (read_shell if ending in SCRIPTS else READERS.get(ending, read_yaml))(text, name)
    keys = {key.split(".")[0] for key in source.entries}
    table = table_of(keys, "" if source.command else program_of(dict.fromkeys(keys)), source.command)
    if table is None:
        raise SpecError(f"{name}: {_unread(source)}")
    return replace(source, flags=table.flags), table


@dataclass(frozen=True)
class Asked:
    """A file, its table, and what the user says of the run."""

    table: Table
    source: Source
    opened: Opened
    gpus: str | ClusterSpec | None
    row_tokens: int | None = None
    is_here: bool = False
    """Whether the file is on this machine. What another one names is not looked up here: a model is the catalog's."""

    def described(self, values: Mapping[str, Any]) -> Described:
        """The workload of the file with other values. Raises ``SpecError``."""
        reading = walk(self.table, self.source.with_values(values), self.opened)
        return described(reading, self.gpus, self.row_tokens, _loaded if self.is_here else _called)


def _unread(source: Source) -> str:
    data = {key.split(".")[0]: entry.value for key, entry in source.entries.items()}
    program = program_of(data)
    if program in ("accelerate", "Kubernetes"):
        return advice(data, source.name)
    made = f"what it returns is {source.command}" if source.command else "keys of no program that kit knows"
    what = f"a configuration of {program}" if program else made
    known = ", ".join(dict.fromkeys(table.program for table in tables()))
    return f"{what}; kit plan reads those of {known}, or takes the model: kit plan {model_named(data)} --gpus 8xH100"


def asked_of(path: Path, gpus: str | None, row_tokens: int | None = None) -> Asked:
    """What ``kit plan`` asks of a file. Raises ``SpecError``."""
    file, dots, function = str(path).partition("::")
    folder = f"{Path(file).absolute().parent.name}/" if file.endswith(".py") else ""
    source, table = source_of(text_of(Path(file)), f"{folder}{Path(file).name}{dots}{function}")
    return Asked(table, source, opener(path), gpus, row_tokens, is_here=True)


def asked_of_text(text: str, name: str, cluster: ClusterSpec) -> Asked:
    """What the page asks of a text from elsewhere, which reaches no file of this machine. Raises ``SpecError``."""
    source, table = source_of(text, name)
    return Asked(table, source, unopened, cluster)
