"""The pins of one leg of ``kit/preflight/versions.json``: constraints.txt with the leg's own versions.

    python scripts/leg.py LEG

``scripts/setup.sh`` asks before anything is installed, so this needs the standard library alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def pins(leg: str) -> list[str]:
    """Lines for pip, ``NAME==VERSION``. Raises KeyError for a leg that is not in the file."""
    row: dict[str, dict[str, str]] = json.loads((ROOT / "kit/preflight/versions.json").read_text())[leg]
    packages = row["packages"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    others = [line for line in lines if line.partition("==")[0] not in packages]
    return [*others, *(f"{name}=={version}" for name, version in packages.items())]


if __name__ == "__main__":
    print("\n".join(pins(sys.argv[1])))
