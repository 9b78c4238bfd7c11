"""What a rule is: a named function that says what is wrong with a layout, and for which engines it speaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import EngineName, Layout
from kit.specs.model import ModelSpec


@dataclass(frozen=True)
class Violation:
    """One broken rule."""

    rule: str
    """The rule's name."""
    message: str
    """Values, rule and nearest fix, on one line."""

    def __str__(self) -> str:
        return self.message


Check = Callable[[ModelSpec, ClusterSpec, JobSpec, Layout], str | None]
"""Returns the message of a violation, or None."""


@dataclass(frozen=True)
class Rule:
    """A check and the engines for which it holds."""

    check: Check
    engines: tuple[EngineName, ...] = ("torch", "deepspeed", "megatron")

    @property
    def name(self) -> str:
        """The function's name, which is the rule's."""
        return self.check.__name__

    def __call__(self, model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> Violation | None:
        if layout.engine not in self.engines:
            return None
        message = self.check(model, cluster, job, layout)
        return None if message is None else Violation(rule=self.name, message=message)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return small + [number // i for i in reversed(small) if i * i != number]


def words(values: list[int]) -> str:
    """``1, 2 or 4``."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
