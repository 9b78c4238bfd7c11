"""Writes ``kit/specs/catalog/catalog.json``, which a plan reads, from the YAML files beside it, which people edit:

python scripts/compile_catalog.py
"""

from __future__ import annotations

import json
from pathlib import Path

from kit.specs import strict_yaml

CATALOG = Path(__file__).resolve().parents[1] / "kit" / "specs" / "catalog"


def compiled() -> str:
    """The text of ``catalog.json``: a line for each value of a row."""
    files = {path.stem: strict_yaml.read(path).data for path in sorted(CATALOG.glob("*.yaml"))}
    return json.dumps(files, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (CATALOG / "catalog.json").write_text(compiled(), encoding="utf-8")
