"""Lint against what the readers of 167 public files say: precision and recall over (file, rule).

    python -m tests.addons.corpus_score     (make prove NAME=lint-corpus)

Notes do not count: they say what depends on something that the file does not show.
"""

from __future__ import annotations

import sys

from kit.addons.lint import lint
from kit.errors import SpecError
from kit.specs import strict_yaml
from scripts.lint_corpus import CORPUS

LEAST = 0.95
Pairs = set[tuple[str, str]]
"""Of (file, rule)."""


def found(name: str) -> set[str]:
    """Rules of one file's errors and warnings."""
    try:
        return {finding.rule for finding in lint(CORPUS / name) if finding.severity != "note"}
    except SpecError:
        return {"unreadable"}


def compared() -> tuple[int, Pairs, Pairs, Pairs]:
    """Of the whole corpus: files, and what lint and a reader both say, what lint alone says, and what it misses."""
    expected = strict_yaml.read(CORPUS / "expected.yaml").data
    said = {(name, rule) for name in expected for rule in found(name)}
    wanted = {(name, rule) for name, rules in expected.items() for rule in rules}
    return len(expected), said & wanted, said - wanted, wanted - said


def main() -> int:
    """Print precision and recall; 1 where one is below what is asked."""
    files, right, false, missed = compared()
    for word, pairs in (("false", false), ("missed", missed)):
        print(*(f"{word:6}  {rule:20} {name}\n" for name, rule in sorted(pairs)), sep="", end="")
    precision, recall = (len(right) / len(right | wrong) for wrong in (false, missed))
    print(f"{files} files: {len(right)} right, {len(false)} false, {len(missed)} missed")
    print(f"precision {precision:.3f}, recall {recall:.3f}")
    return int(min(precision, recall) < LEAST)


if __name__ == "__main__":
    sys.exit(main())
