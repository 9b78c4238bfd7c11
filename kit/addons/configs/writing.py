"""A plan in a program's own keys: the walk backwards, for the files that ``kit emit --target`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.addons.configs.tables import Row, Table, tables
from kit.addons.configs.walk import number
from kit.planner.plan import Plan


def written(target: str, plan: Plan, beside: dict[str, Any]) -> dict[str, Any]:
    """The keys of the target's table in the order of its ``file``. ``beside``: what kit has no field for, by the key of
    the program or by the kind of its row."""
    table = next(each for each in tables() if each.target == target and each.file)
    given = _fields(plan) | dict(beside)
    found = {key: given.get(key, _value(table, key, how, given)) for key, how in table.file.items()}
    return {key: value for key, value in found.items() if value is not None}


def _fields(plan: Plan) -> dict[str, Any]:
    job = plan.job
    parts = (("layout", plan.layout), ("job", job), ("job.optimizer", job.optimizer), ("job.lora", job.lora))
    fields = {f"{name}.{key}": value for name, part in parts if part for key, value in vars(part).items()}
    return fields | {"accumulation": plan.layout.gradient_accumulation_steps, "job.lora": job.lora and True}


def _value(table: Table, key: str, how: Any, given: Mapping[str, Any]) -> Any:
    if how not in ("always", "on"):
        return how
    row = table.keys.get(key, Row())
    value = _own(row, given.get(row.field or row.kind))
    return None if how == "on" and value is False else row.default if value is None and how == "always" else value


def _own(row: Row, value: Any) -> Any:
    """The first of the program's values that means kit's, or else that leaves kit's as it is."""
    names = [name for name, each in row.values.items() if each == value]
    names += [name for name, each in row.values.items() if each is None]
    return value if not row.values else number(names[0]) if names else None
