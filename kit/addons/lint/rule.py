"""Rules of lint. Most are rows of a table, each a predicate and a sentence, or what finds several things and a sentence
for each; others are checks in code:

    table("deepspeed", {
        Rule("batch-missing", "ds", "no batch size at all", "DeepSpeed refuses to guess"): (
            Case("error", "", lambda c: not c.has("train_batch_size"), "train_batch_size is missing", "add it"),
        ),
        Rule("removed-key", "ds", "features that DeepSpeed dropped", "it refuses to start"): (
            Each("error", lambda c, key: key, lambda c: [each for each in DROPPED if c.has(each)], "gone", "remove it"),
        ),
    })

    @check("deepspeed", Rule("batch-arithmetic", "ds", "batch sizes whose product is wrong", "an assertion fails"))
    def batch_arithmetic(config: Config) -> Iterator[Finding]: ...

The table of docs/lint.md is written from here (``kit lint --rules``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

from kit.addons.lint.finding import Changes, Finding, Severity

Reads = Literal["deepspeed", "accelerate", "launch", "priced"]
"""Input of a check: the ``Config`` of a DeepSpeed or accelerate file, a ``Command`` of a script, or a configuration
beside its workload (``Priced``)."""
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
    """What is judged, which knows its file and its lines."""

    def finding(
        self, rule: str, severity: Severity, key: str, why: str, fix: str, changes: Changes = ()
    ) -> Finding: ...


G = TypeVar("G", bound=_Subject)


@dataclass(frozen=True)
class Case(Generic[G]):
    """One condition of a rule, with its message. A text that depends on values is a function of the input."""

    severity: Severity | Callable[..., Severity]
    key: str | Callable[..., str]
    when: Callable[[G], Any]
    why: str | Callable[..., str]
    fix: str | Callable[..., str]
    changes: Changes | Callable[..., Changes] = ()

    def findings(self, rule: str, given: G) -> Iterator[Finding]:
        """One where the condition holds."""
        if self.when(given):
            yield self.of(rule, given)

    def of(self, rule: str, *given: Any) -> Finding:
        """The finding. ``given``: what the texts are functions of; the input is the first."""
        parts: tuple[Any, ...] = (self.severity, self.key, self.why, self.fix, self.changes)
        subject: _Subject = given[0]
        return subject.finding(rule, *(part(*given) if callable(part) else part for part in parts))


class Each(Case[G]):
    """A condition of several things: ``when`` finds them, and the texts are functions of the input and of one."""

    def findings(self, rule: str, given: G) -> Iterator[Finding]:
        """One for each."""
        return (self.of(rule, given, each) for each in self.when(given))


RULES: dict[str, Rule] = {}
CHECKS: dict[Reads, list[Callable[[Any], Iterator[Finding]]]] = {reads: [] for reads in get_args(Reads)}
_ORDER = ("ds", "accelerate", "script", "recipe", "run")


def findings(reads: Reads, given: Any) -> Iterator[Finding]:
    """What all checks of a kind of input say of one."""
    return (finding for each in CHECKS[reads] for finding in each(given))


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
    return (finding for case in cases for finding in case.findings(rule, given))


def markdown() -> str:
    """A Markdown table of all rules."""
    lines = ["| rule | reads | finds | why it matters |", "|---|---|---|---|"]
    for rule in sorted(RULES.values(), key=lambda rule: (_ORDER.index(rule.files.split(",")[0]), rule.name)):
        lines.append(f"| `{rule.name}` | {rule.files} | {rule.finds} | {rule.matters} |")
    return "\n".join(lines)
