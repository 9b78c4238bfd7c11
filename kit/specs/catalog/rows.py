"""The rows of the data files beside this module.

People write the YAML files. ``catalog.json`` has the same values and loads ten times faster: a plan reads that one.
``python scripts/compile_catalog.py`` writes it, and a test compares the two.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _catalog() -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("catalog.json").read_bytes())
    return files


def rows(name: str) -> dict[str, Any]:
    """The rows of ``<name>.yaml``, by key, in file order. Treat them as read-only: they are shared."""
    return _catalog()[name]
