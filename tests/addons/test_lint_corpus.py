"""Lint against what the readers of 167 public files say: precision and recall over (file, rule).

``make prove NAME=lint-corpus`` prints them. Notes do not count: they say what depends on something that the file does
not show.
"""

from __future__ import annotations

import re

from kit.addons.lint import lint
from kit.errors import SpecError
from kit.specs import strict_yaml
from scripts.lint_corpus import CORPUS

LEAST = 0.95
SECRET = re.compile(r"/home/|/Users/|hf_[A-Za-z0-9]{20}|sk-[A-Za-z0-9]{20}|(?i:api[_-]?key|password)\s*[:=]")


def found(name: str) -> set[str]:
    """Rules of one file's errors and warnings."""
    try:
        return {finding.rule for finding in lint(CORPUS / name) if finding.severity != "note"}
    except SpecError:
        return {"unreadable"}


def test_precision_and_recall() -> None:
    expected = strict_yaml.read(CORPUS / "expected.yaml").data
    assert len(expected) >= 120
    said = {(name, rule) for name in expected for rule in found(name)}
    wanted = {(name, rule) for name, rules in expected.items() for rule in rules}
    right, false, missed = said & wanted, sorted(said - wanted), sorted(wanted - said)
    print(f"\nfalse {false}\nmissed {missed}\n{len(expected)} files: {len(right)} right")
    print(f"precision {len(right) / len(said):.3f}, recall {len(right) / len(wanted):.3f}")
    assert len(right) >= LEAST * len(said), false
    assert len(right) >= LEAST * len(wanted), missed


def test_every_file_has_a_source_a_commit_and_a_licence() -> None:
    sources = strict_yaml.read(CORPUS / "sources.yaml").data
    licences = strict_yaml.read(CORPUS / "licences.yaml").data
    files = {f"{path.parent.name}/{path.name}" for path in CORPUS.glob("*/*")}
    assert set(sources) == files == set(strict_yaml.read(CORPUS / "expected.yaml").data)
    for name, source in sources.items():
        assert source["commit"] in source["source"], name
        assert source["licence"] in ("Apache-2.0", "MIT", "BSD-3-Clause"), name
        repository = "/".join(source["source"].split("/")[3:5])
        assert source["licence"] in {seen["licence"] for seen in licences.get(repository, [])}, name
        assert not SECRET.search((CORPUS / name).read_text()), name
