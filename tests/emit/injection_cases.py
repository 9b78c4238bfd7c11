"""Hostile text for ``test_injection``: pieces that mean something to a shell, to YAML, JSON, Markdown or Slurm; every
place of a plan and a run where text stands; and plans whose every text is such a value.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

import kit
from kit.emit.run_directory import TARGETS, files_of
from kit.errors import SpecError
from kit.planner.plan import Plan
from kit.specs import strict_yaml
from kit.specs.base import Name, Text, TextMapping
from kit.specs.catalog import load_model
from kit.specs.run import DataSpec, RunSpec

CONTROLS = [*map(chr, range(32)), *map(chr, range(127, 160)), "\u2028", "\u2029"]
EXAMPLES = (
    "x\ntouch CANARY",
    "$(touch CANARY)",
    "`touch CANARY`",
    "'; touch CANARY; '",
    "--flag",
    "x\u2028y",
    "#SBATCH --x",
)
# fmt: off
PIECES = [
    "$(touch CANARY)", "`touch CANARY`", ";touch CANARY;", "';", '"; touch CANARY;"', "'; touch CANARY; '",
    "${X:-$(touch CANARY)}", "|touch CANARY", ">CANARY", "&&", "#SBATCH --x", "#", "%s", "%j", "\\", "\\n", '\\"',
    "'", '"', "--flag", "-", "=", ":", ",", "@", "!", "?", "*", "&", " ", "{", "}", "[", "]", "---", "...", "<b>",
    "[x](y)", "|", "**", "1e5", "1e-5", "0x1F", "null", "true", "on", "x", "7", "/a/b", "é", "模型", "😀", "\u00a0",
    "\ntouch CANARY\n", "\r#SBATCH --x\r", "\u2028", "\ufeff",
]
# fmt: on
VALUES = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)
STUBS = ("accelerate", "deepspeed", "nsys", "pdsh", "python", "scontrol", "srun", "torchrun")
ENGINES = ["torch", "deepspeed", "megatron"]
Place = tuple[str | int, ...]


def fuzz(examples: int) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """The test with the same values each time: those above, and ``examples`` others."""

    def wrap(test: Callable[[str], None]) -> Callable[[], None]:
        for value in EXAMPLES:
            test = example(value=value)(test)
        settled = settings(derandomize=True, database=None, deadline=None, max_examples=examples)
        return settled(given(value=VALUES)(test))

    return wrap


def texts(kind: Any, place: Place = ()) -> Iterator[tuple[Place, bool]]:
    """Every text below a spec: its place, and whether it is a key there. Fails for text that is not checked."""
    assert kind is not str, f"{place}: a spec's text has the type Text, which refuses control characters"
    inner = typing.get_args(kind)
    if kind in (Text, Name):
        yield place, False
    elif kind == TextMapping:
        yield from (((*place, "rope_type"), False), (place, True), ((*place, "list"), False))
    elif typing.get_origin(kind) is typing.Annotated:
        yield from texts(inner[0], place)  # a number with its limits
    elif dataclasses.is_dataclass(kind):
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            yield from texts(hint, (*place, name))
    elif typing.get_origin(kind) is dict:
        assert inner[0] == Text, place
        yield place, True
        yield from texts(inner[1], (*place, "key"))
    elif typing.get_origin(kind) is tuple:
        yield from texts(inner[0], (*place, 0))
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for option in inner:
            yield from texts(option, place)
    elif typing.get_origin(kind) is not typing.Literal:
        assert kind in (int, float, bool, type(None)), f"{place}: {kind}"


PLACES = [(kind, *text) for kind in (Plan, RunSpec) for text in texts(kind)]


@cache
def planned(engine: str) -> Plan:
    layers = "huggingface" if engine == "deepspeed" else None
    return kit.plan("llama-3.1-8b", "p5.48xlarge:2", pins=kit.Pins(engine=engine, implementation=layers))


def plain(kind: type) -> dict[str, Any]:
    if kind is Plan:
        return _approximate(strict_yaml.to_plain(planned("deepspeed")))
    return strict_yaml.to_plain(RunSpec(data=DataSpec(train="train")))


def _approximate(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan of a model that no family describes, with the texts that only such a model has."""
    known = strict_yaml.to_plain(load_model("qwen3-next-80b-a3b").approximate)
    plan["model"] |= {"family": "transformers", "approximate": known}
    return plan


_REQUIRED = {"key": {"weight": 1}, "stream": {"path": "json", "data_files": ["a"], "tokenizer": "a"}}
"""Values that a missing mapping of this name needs beside the one that is put into it."""


def put(data: Any, place: Place, is_key: bool, text: str) -> None:
    steps = place if is_key else place[:-1]
    for step, after in zip(steps, (*place[1:], None), strict=False):
        if isinstance(data, dict) and data.get(step) is None:
            data[step] = [] if after == 0 else copy.deepcopy(_REQUIRED.get(step, {}))
        data = data[step]
    if is_key:
        data[text] = {"blend": {"path": "a", "weight": 1}, "validation_sets": "a"}.get(str(place[-1]), 1)
    elif isinstance(data, list):
        data[:] = [text, *data[1:]]
    else:
        data[place[-1]] = [text] if place[-1] == "list" else text


def hostile(plan: Plan, value: Any) -> Plan:
    """The plan with ``value(i)`` for its i-th text; keys that the cost model chose are left."""
    data = strict_yaml.to_plain(plan)
    described = plan.layout.engine == "megatron"  # which has no other models
    data = data if described else _approximate(data)
    data["model"]["rope_scaling"] = {"rope_type": "llama3", **(data["model"]["rope_scaling"] or {})}
    for index, (kind, place, is_key) in enumerate(PLACES):
        if described and "approximate" in place:
            continue
        if kind is Plan and place[-1] != "rope_type" and (not is_key or place[-1] == "rope_scaling"):
            put(data, place, is_key, value(index))
    return strict_yaml.parse(Plan, data, strict_yaml.Document(name="plan", data=data, lines={}))


def files(engine: str, value: str) -> dict[str, str]:
    """What is emitted where every text is ``value``; nothing where it is refused, as control characters must be."""
    try:
        return files_of(hostile(planned(engine), lambda index: value), TARGETS)
    except SpecError:
        assert set(value) & set(CONTROLS), "refused without a reason"
        return {}


def leaves(data: Any) -> Any:
    """Nested values as pairs, which show a key that was lost, added or moved."""
    if isinstance(data, dict):
        return [(key, leaves(value)) for key, value in data.items()]
    return [leaves(value) for value in data] if isinstance(data, list) else data


def replaced(data: Any, value: str) -> Any:
    """``harmless-N`` as the value."""
    if isinstance(data, list | tuple):
        return type(data)(replaced(part, value) for part in data)
    return value if isinstance(data, str) and re.fullmatch(r"harmless-\d+", data) else data


@cache
def harmless(engine: str) -> dict[str, str]:
    return files_of(hostile(planned(engine), lambda index: f"harmless-{index}"), TARGETS)
