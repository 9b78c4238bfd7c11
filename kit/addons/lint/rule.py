"""Rules of lint. Most are rows of a table, each a predicate and a sentence; others are checks in code:

    table("deepspeed", {
        Rule("batch-missing", "ds", "no batch size at all", "DeepSpeed refuses to guess"): (
            Case("error", "", lambda c: not c.has("train_batch_size"), "train_batch_size is missing", "add it"),
        ),
    })

    @check("deepspeed", Rule("text-value", "ds", "numbers in quotes", "unequal to the number they are compared with"))
    def text_value(config: Config) -> Iterator[Finding]: ...

The table of docs/lint.md is written from here (``kit lint --rules``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

from kit.addons.lint.finding import Changes, Finding, Severity

Reads = Literal["deepspeed", "accelerate", "launch"]
"""Input of a check: the ``Config`` of a DeepSpeed or accelerate file, or a ``Command`` of a script."""
C = TypeVar("C", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rule:
    """Describes one rule for docs/lint.md."""

    name: str
    files: str
    """Files that the rule reads: DeepSpeed configuration (ds), accelerate's YAML, script, recipe, run directory."""
    finds: str
    matters: str
    """What happens if nobody fixes it."""


class _Subject(Protocol):
    """A ``Config`` or a ``Command``."""

    def finding(
        self, rule: str, severity: Severity, key: str, why: str, fix: str, changes: Changes = ()
    ) -> Finding: ...


G = TypeVar("G", bound=_Subject)


@dataclass(frozen=True)
class Case(Generic[G]):
    """One condition of a rule, with its message. A text that depends on values is a function of the input."""

    severity: Severity
    key: str | Callable[[G], str]
    when: Callable[[G], object]
    why: str | Callable[[G], str]
    fix: str | Callable[[G], str]
    changes: Changes | Callable[[G], Changes] = ()

    def of(self, rule: str, given: G) -> Finding:
        """The finding."""
        key, why, fix = (text if isinstance(text, str) else text(given) for text in (self.key, self.why, self.fix))
        changes = self.changes if isinstance(self.changes, tuple) else self.changes(given)
        return given.finding(rule, self.severity, key, why, fix, changes)


RULES: dict[str, Rule] = {}
CHECKS: dict[Reads, list[Callable[[Any], Iterator[Finding]]]] = {"deepspeed": [], "accelerate": [], "launch": []}
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


def table(reads: Reads, rows: Mapping[Rule | str, tuple[Case[G], ...]]) -> None:
    """Registers one check per row. A row may name a rule that is described elsewhere."""
    for rule, cases in rows.items():
        name, described = (rule, ()) if isinstance(rule, str) else (rule.name, (rule,))
        check(reads, *described)(partial(_findings, name, cases))


def _findings(rule: str, cases: tuple[Case[G], ...], given: G) -> Iterator[Finding]:
    return (case.of(rule, given) for case in cases if case.when(given))


def markdown() -> str:
    """A Markdown table of all rules."""
    lines = ["| rule | reads | finds | why it matters |", "|---|---|---|---|"]
    for rule in sorted(RULES.values(), key=lambda rule: (_ORDER.index(rule.files.split(",")[0]), rule.name)):
        lines.append(f"| `{rule.name}` | {rule.files} | {rule.finds} | {rule.matters} |")
    return "\n".join(lines)
