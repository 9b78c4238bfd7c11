"""Every place of a plan and a run where text stands, for ``test_injection``; plans whose every text is one value."""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from kit.emit.run_directory import TARGETS, files_of
from kit.entry_points import registered
from kit.errors import SpecError
from kit.planner.plan import Alternative, Decision, Plan
from kit.specs import strict_yaml
from kit.specs.catalog import load_model
from kit.specs.run import DataSpec, RunSpec
from kit.specs.validation import Name, Text, TextMapping
from tests.emit.plans import DENSE, TORCH, ZERO2, plan_of
from tests.support import hostile

OF_ENGINE = {"torch": TORCH | {"zero_stage": 3, "dp": 16}, "deepspeed": ZERO2 | {"dp": 16}, "megatron": DENSE}
Place = tuple[str | int, ...]


def texts(kind: Any, place: Place = ()) -> Iterator[tuple[Place, bool]]:
    """Every text below a spec: its place, and whether it is a key there. Fails for text that is not checked."""
    assert kind is not str, f"{place}: a spec's text has the type Text, which refuses control characters"
    inner, origin = typing.get_args(kind), typing.get_origin(kind)
    if kind in (Text, Name):
        yield place, False
    elif kind == TextMapping:
        yield from (((*place, "rope_type"), False), (place, True), ((*place, "list"), False))
    elif dataclasses.is_dataclass(kind):
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            yield from texts(hint, (*place, name))
    elif origin is dict:
        assert inner[0] == Text, place
        yield from ((place, True), *texts(inner[1], (*place, "key")))
    elif origin in (typing.Annotated, tuple, typing.Union, types.UnionType):
        options = inner if origin in (typing.Union, types.UnionType) else inner[:1]  # a number with its limits
        yield from (found for each in options for found in texts(each, (*place, 0) if origin is tuple else place))
    else:
        assert origin is typing.Literal or kind in (int, float, bool, type(None)), f"{place}: {kind}"


PLACES = [(kind, *text) for kind in (Plan, RunSpec) for text in texts(kind)]


@cache
def planned(engine: str) -> Plan:
    why = Decision(rule="engine", chosen=engine, why="pinned", rejected=("others",))
    also = (Alternative(layout="others", step_time_s=2.0),)
    plan = plan_of(cluster="p5.48xlarge:2", **OF_ENGINE[engine])
    return dataclasses.replace(plan, decisions=(why,), alternatives=also)


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
    for step, after in zip(place if is_key else place[:-1], (*place[1:], None), strict=False):
        if isinstance(data, dict) and data.get(step) is None:
            data[step] = [] if after == 0 else copy.deepcopy(_REQUIRED.get(step, {}))
        data = data[step]
    if is_key:
        data[text] = {"blend": {"path": "a", "weight": 1}, "validation_sets": "a"}.get(str(place[-1]), 1)
    elif isinstance(data, list):
        data[:] = [text, *data[1:]]
    else:
        data[place[-1]] = [text] if place[-1] == "list" else text


def with_texts(plan: Plan, value: str) -> Plan:
    """The plan with ``value`` for each of its texts; keys that the cost model chose are left."""
    data = strict_yaml.to_plain(plan)
    described = plan.layout.engine == "megatron"  # which has no other models
    data = data if described else _approximate(data)
    data["model"]["rope_scaling"] = {"rope_type": "llama3", **(data["model"]["rope_scaling"] or {})}
    for kind, place, is_key in PLACES:
        chosen = kind is Plan and place[-1] != "rope_type" and (not is_key or place[-1] == "rope_scaling")
        if chosen and not (described and "approximate" in place):
            put(data, place, is_key, value)
    return strict_yaml.parse(Plan, data, strict_yaml.Document(name="plan", data=data, lines={}))


def files(engine: str, value: str) -> dict[str, str]:
    """What is emitted where every text is ``value``; nothing where it is refused, as control characters must be."""
    try:
        return files_of(with_texts(planned(engine), value), [*registered(TARGETS)])
    except SpecError:
        assert set(value) & set(hostile.CONTROLS), "refused without a reason"
        return {}


def leaves(data: Any, value: str) -> Any:
    """Nested values as pairs, which show a key that was lost, added or moved; ``harmless`` as ``value``."""
    if isinstance(data, dict):
        return [(leaves(key, value), leaves(inner, value)) for key, inner in data.items()]
    return [leaves(inner, value) for inner in data] if isinstance(data, list) else value if data == "harmless" else data
