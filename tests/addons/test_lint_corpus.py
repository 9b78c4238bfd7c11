"""Lint says of public files what the programs say that read them."""

from __future__ import annotations

import re

from kit.specs import strict_yaml
from scripts.lint_corpus import CORPUS
from tests.addons.corpus_score import LEAST, compared

SECRET = re.compile(r"/home/|/Users/|hf_[A-Za-z0-9]{20}|sk-[A-Za-z0-9]{20}|(?i:api[_-]?key|password)\s*[:=]")


def test_precision_and_recall() -> None:
    files, right, false, missed = compared()
    assert files >= 120
    assert len(right) >= LEAST * len(right | false), sorted(false)
    assert len(right) >= LEAST * len(right | missed), sorted(missed)


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
