"""A table's walk over a file: which of kit's fields the file decides, and what kit does not model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kit.addons.configs.entries import Entry, Source, Unresolved, word
from kit.addons.configs.tables import OFF, Bound, Row, Table, matched, names, table_of_kind
from kit.addons.configs.yaml_entries import read_yaml
from kit.errors import SpecError
from kit.specs.extra import flat
from kit.specs.job import ATTENTION_LAYERS, MLP_LAYERS

Opened = Callable[[str], Mapping[str, Any]]
"""A file that another one names → its values. Raises ``SpecError``."""


@dataclass(frozen=True)
class Gap:
    """A value that kit does not model, and on which side of kit's figure the true one is."""

    bound: Bound
    key: str
    why: str
    line: int = 0


@dataclass(frozen=True)
class Reading:
    """kit's fields as a file decides them."""

    fields: Mapping[str, Any]
    gaps: tuple[Gap, ...]


def walk(table: Table, source: Source, opened: Opened) -> Reading:
    """Every key of the table in its order, over what the program decides whatever the file says. Raises ``SpecError``
    with a line for each value without an answer."""
    fields: dict[str, Any] = dict(table.always)
    gaps: list[Gap] = []
    refused: list[str] = []
    entries = {"command": Entry(source.command or None, 0), **_of_file(source, opened), **source.entries}
    for key, row in table.keys.items():
        entry = entries.get(key, Entry(None, 0))
        value = row.default if entry.value is None or entry.value == "" else entry.value
        if value is None:
            continue
        if row.after:
            first = entries.get(row.after, Entry(None, 0)).value
            value = f"{word(table.keys[row.after].default if first is None else first)} {word(value)}"
        place = f"{source.name}:{entry.line}: {key}" if entry.line else f"{source.name}: {key}"
        if isinstance(value, Unresolved) and not names(row, value):
            unread = ", which kit does not run" if source.form == "python" else ""
            refused += [f"{place} is {value}{unread}"] if row != Row() else []
        elif (why := matched(row.refuse, value)) is not None and word(value) not in row.values:
            refused.append(f"{place}={word(value)[:60]}: {why}")
        else:
            if (gap := matched(row.gap, value)) is not None:
                gaps.append(Gap(gap[0], key, gap[1], entry.line))
            try:
                fields |= dict(_decided(row, value, gaps, key, entry.line, opened))
            except SpecError as error:
                refused.append(f"{place}={word(value)[:60]}: {'; '.join(str(error).splitlines())}")
    if refused:
        raise SpecError("\n".join(refused))
    return Reading(fields, tuple(gaps))


_NAME_A_FILE = (
    *("%(config)s", "%(argument)s", "%(job.config_file)s", "%(env.CONFIG_FILE)s"),
    "torchtitan/models/%(module)s/config_registry.py::%(config)s",
)
"""A file, and of Python its function, by the flags of the command that names it."""


def _of_file(source: Source, opened: Opened) -> dict[str, Entry]:
    """Values of the file that a command names, which the command's own flags overrule."""
    told = defaultdict(str, {key: word(entry.value) for key, entry in source.entries.items()})
    named = [each % told for each in _NAME_A_FILE if source.command]
    file = next((each for each in named if re.fullmatch(r".*\.(ya?ml|json|toml)|.*\w/\w+\.py::\w+", each)), None)
    return {key: Entry(value, 0) for key, value in flat(opened(file)).items()} if file else {}


def _decided(row: Row, value: Any, gaps: list[Gap], key: str, line: int, opened: Opened) -> Iterator[tuple[str, Any]]:
    """(field, its value) of a key that is given, or has a default."""
    if row.kind == "list":
        layers, others = adapted(value)
        yield "job.lora.target_modules", layers
        if others:
            gaps.append(Gap("least", key, f"adapters on {', '.join(others[:4])} are not counted", line))
    elif row.kind == "names":
        yield row.field, value if isinstance(value, list) else str(value).split()
    elif row.kind:
        yield from _linked(row, str(value), opened).items() if word(value).lower() not in OFF else ()
    elif row.field and (found := kits(row, value)) is not None:
        yield row.field, found
    yield from (matched(row.sets, value) or {}).items()


def _linked(row: Row, named: str, opened: Opened) -> Mapping[str, Any]:
    """Fields of a file, of its text, or of one that the program brings, by the table of what it is of."""
    name = named.rsplit("/", 1)[-1]
    if named.lstrip().startswith("{"):
        source = read_yaml(named, "its text")
    else:
        found = {"zero_optimization": row.named[name]} if name in row.named else opened(named)
        source = Source(name, "", "yaml", {key: Entry(each, 0) for key, each in flat(found).items()})
    return walk(table_of_kind(row.kind), source, opened).fields


_COUNTS = frozenset(
    {
        *("accumulation", "job.global_batch_size", "job.seq_length", "job.lora.rank", "job.grpo.num_generations"),
        *("job.grpo.max_completion_length", "layout.micro_batch_size", "layout.tp", "layout.pp", "layout.cp"),
        *("layout.ep", "layers_of_chunk", "micro_tokens", "packed_length", "prompt_tokens", "prompts"),
        *("rank_tokens", "step_tokens", "loss_chunks"),
        *("model.num_layers", "model.hidden_size", "model.num_attention_heads", "model.ffn_hidden_size"),
    }
)
"""Fields with which kit reckons before their own specs judge them."""


def kits(row: Row, value: Any) -> Any:
    """kit's value for a program's. Raises ``SpecError`` where there is none."""
    if not row.values:
        found = number(value)
        if row.field in _COUNTS and found != row.default and not (isinstance(found, int) and found >= 0):
            raise SpecError("a whole number belongs here")
        return found
    text = word(value)
    known = row.values if text in row.values else {name.lower(): each for name, each in row.values.items()}
    if (key := text if text in known else text.lower()) not in known:
        raise SpecError(f"kit knows {', '.join(list(row.values)[:8])} of it")
    return known[key]


def number(value: Any) -> Any:
    """Numbers and switches in text, as programs read them."""
    text = word(value)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?\d[\d_]*", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
        whole = float(text)
        return int(whole) if whole.is_integer() and abs(whole) < 1e15 and "e" in text.lower() else whole
    return value


_LAYERS = ATTENTION_LAYERS | MLP_LAYERS


def adapted(value: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The layers that get adapters, by Llama's names; and the names that are none of them. A text with the
    signs of a regular expression is tried on the layers' full names, as peft does."""
    if isinstance(value, str) and value.startswith("["):  # hydra's list
        value = value.strip("[]").split(",")
    names: Sequence[str] = [str(each) for each in value] if isinstance(value, list | tuple) else str(value).split(",")
    names = [name.strip() for name in names if name.strip()]
    if len(names) == 1 and re.search(r"[\\|*()\[]", names[0]):
        names = _of_expression(str(value)) or ["all-linear"]
    last = [name.rsplit(".", 1)[-1] for name in names]
    everything = {"all", "all-linear", "all_linear"} & set(last)
    others = tuple(name for name in last if name not in _LAYERS and name not in everything)
    chosen = set() if everything else _LAYERS & set(last)
    return tuple(sorted(chosen or _LAYERS)), others


def _of_expression(text: str) -> list[str]:
    parts = {"self_attn": ATTENTION_LAYERS, "mlp": MLP_LAYERS}
    try:
        expression = re.compile(text)
    except re.error:
        return []
    heads = ("model.layers.0", "model.language_model.layers.0", "language_model.model.layers.0")
    full = [(f"{head}.{part}.{name}", name) for head in heads for part, layers in parts.items() for name in layers]
    return sorted({name for path, name in full if expression.fullmatch(path)})
