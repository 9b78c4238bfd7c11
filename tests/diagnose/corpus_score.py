"""Lint against what the readers of 167 public files say: precision and recall over (file, rule).

    python -m tests.diagnose.corpus_score     (make prove NAME=lint-corpus)

Notes do not count: they say what depends on something that the file does not show.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from kit.diagnose.lint import lint
from kit.errors import SpecError
from kit.specs import strict_yaml
from tests.diagnose.corpus_readers import CORPUS

LEAST = 0.95


@dataclass(frozen=True)
class Score:
    """Pairs of (file, rule)."""

    right: frozenset[tuple[str, str]]
    false: frozenset[tuple[str, str]]
    missed: frozenset[tuple[str, str]]
    files: int

    @property
    def precision(self) -> float:
        """Of what lint says, the part that a reader says too."""
        return len(self.right) / len(self.right | self.false)

    @property
    def recall(self) -> float:
        """Of what a reader says, the part that lint says too."""
        return len(self.right) / len(self.right | self.missed)


def found(name: str) -> set[str]:
    """Rules of one file's errors and warnings."""
    try:
        return {finding.rule for finding in lint(CORPUS / name) if finding.severity != "note"}
    except SpecError:
        return {"unreadable"}


def score() -> Score:
    """Of the whole corpus."""
    expected = strict_yaml.read(CORPUS / "expected.yaml").data
    said = {(name, rule) for name in expected for rule in found(name)}
    wanted = {(name, rule) for name, rules in expected.items() for rule in rules}
    return Score(frozenset(said & wanted), frozenset(said - wanted), frozenset(wanted - said), len(expected))


def main() -> int:
    """Print it; 1 where it is below what is asked."""
    result = score()
    for word, pairs in (("false", result.false), ("missed", result.missed)):
        for name, rule in sorted(pairs):
            print(f"{word:6}  {rule:20} {name}")
    right, false, missed = (len(pairs) for pairs in (result.right, result.false, result.missed))
    print(f"{result.files} files: {right} right, {false} false, {missed} missed")
    print(f"precision {result.precision:.3f}, recall {result.recall:.3f}")
    return int(min(result.precision, result.recall) < LEAST)


if __name__ == "__main__":
    sys.exit(main())
