"""Rules of lint: each check is registered where it stands, with the rules whose findings it gives.

    @check("deepspeed", Rule("batch-missing", "ds", "no batch size at all", "DeepSpeed refuses to guess"))
    def batch_missing(config: Config) -> Iterator[Finding]: ...

The table of docs/lint.md is written from here (``kit lint --rules``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from kit.diagnose.lint.finding import Finding

Reads = Literal["deepspeed", "accelerate", "launch"]
"""What a check is given: the ``Config`` of a DeepSpeed or accelerate file, or a script's name and a ``Command``."""
C = TypeVar("C", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rule:
    """What the findings of one name are about."""

    name: str
    files: str
    """What it reads: a DeepSpeed configuration (ds), accelerate's YAML, a script, a recipe, a run directory."""
    finds: str
    matters: str
    """What happens where nobody finds it."""


RULES: dict[str, Rule] = {}
CHECKS: dict[Reads, list[Callable[..., Iterator[Finding]]]] = {"deepspeed": [], "accelerate": [], "launch": []}
_ORDER = ("ds", "accelerate", "script", "recipe", "run")


def check(reads: Reads | None, *rules: Rule) -> Callable[[C], C]:
    """Register a check for one kind of input, or None for one that is called by name, and describe its rules."""

    def register(function: C) -> C:
        for rule in rules:
            assert rule.name not in RULES, f"two rules are called {rule.name}"
            RULES[rule.name] = rule
        if reads is not None:
            CHECKS[reads].append(function)
        return function

    return register


def markdown() -> str:
    """A table of all rules, a line each."""
    lines = ["| rule | reads | finds | why it matters |", "|---|---|---|---|"]
    for rule in sorted(RULES.values(), key=lambda rule: (_ORDER.index(rule.files.split(",")[0]), rule.name)):
        lines.append(f"| `{rule.name}` | {rule.files} | {rule.finds} | {rule.matters} |")
    return "\n".join(lines)
