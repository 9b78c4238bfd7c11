"""``extra`` of a recipe beside the plan: what the plan decides is refused, everything else is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from kit.emit import deepspeed, megatron
from kit.emit.derived_file import DerivedFile
from kit.errors import SpecError
from kit.planner.plan import Decision, Plan
from kit.specs.extra import Extra, flat
from kit.specs.layout import describe
from kit.specs.text import nearest, shown

_FILES: Mapping[str, DerivedFile] = {"megatron": megatron.FILES[0], "deepspeed": deepspeed.FILES[0]}
"""Section of ``extra`` → the file that it is merged into."""
NOT_PREDICTED = "passed on as it is, not in the prediction"


def with_extra(plan: Plan, extra: Extra) -> Plan:
    """The plan with a recipe's keys. Raises ``SpecError`` for a key that the plan decides, and for an engine whose file
    the plan does not have."""
    if not extra:
        return plan
    made = dataclasses.replace(plan, extra=extra, decisions=(*plan.decisions, *_said(extra)))
    check_extra(made)
    return made


def _said(extra: Extra) -> Iterator[Decision]:
    for key, value in extra.flat().items():
        yield Decision(rule="extra", chosen=f"{shown(key, str)}={shown(value)}", why=NOT_PREDICTED)


def check_extra(plan: Plan) -> None:
    """Raises ``SpecError`` with all keys of ``plan.extra`` that the plan decides."""
    problems = [problem for name, file in _FILES.items() for problem in _problems(plan, name, file)]
    if problems:
        raise SpecError("\n".join(problems))


def _problems(plan: Plan, name: str, file: DerivedFile) -> Iterator[str]:
    keys = flat(getattr(plan.extra, name))
    if keys and not file.applies(plan):
        yield f"extra.{name} with {describe(plan.layout)}, which has no {file.name}: leave it out"
        return
    if keys and name == "megatron":
        known = megatron.megatron_settings(dataclasses.replace(plan, extra=Extra()))
        for section in plan.extra.megatron.keys() - known.keys():
            yield f"extra.megatron.{shown(section, str)}: {file.name} has no such section; {nearest(section, known)}"
    for key, value in keys.items():
        for owned, source in file.plan_owned_keys.items():
            if f"{key}.".startswith(f"{owned}.") or f"{owned}.".startswith(f"{key}."):
                yield (
                    f"extra.{name}.{shown(key, str)}={shown(value)}: the plan decides {owned} of {file.name}; change "
                    f"{source} in the recipe"
                )
                break
