"""The versions with which kit's suite was run (versions.json), and whether the installed ones lie between them.

A row of the file, a leg, names an environment that ``scripts/setup.sh`` builds: CI runs ``main``, the others run at
night (docs/versions.md). Imports none of the packages.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from kit.preflight.check_result import CheckResult, failure, warning

LEGS: dict[str, dict[str, Any]] = json.loads(files(__package__).joinpath("versions.json").read_text("utf-8"))
"""Leg → its ``python``, ``packages`` (exact versions), and the last run of tests (``tested``). Oldest first."""
NEWEST: dict[str, str] = {name: version for leg in LEGS.values() for name, version in leg["packages"].items()}
OLDEST = {name: next(leg["packages"][name] for leg in LEGS.values() if name in leg["packages"]) for name in NEWEST}
IMPORTED_BY_ALL = ("torch", "transformers")
"""Packages of every engine: with older ones than were tested no run starts."""


def installed_version(name: str) -> str | None:
    """Version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> list[int]:
    """Major and minor version: ``2.13.0+cpu`` is [2, 13]."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def check_versions(
    version_of: Callable[[str], str | None] = installed_version,
    oldest: Mapping[str, str] = OLDEST,
    newest: Mapping[str, str] = NEWEST,
) -> CheckResult | None:
    """Compares major and minor versions with those tested, in one line. None if none lies outside.

    ``version_of``: the installed version of a package; None, if it is not installed, passes. A failure where a package
    of every engine is too old, otherwise a warning.
    """
    here = {name: numbers(version) for name in newest if (version := version_of(name))}
    outside = [name for name in here if not numbers(oldest[name]) <= here[name] <= numbers(newest[name])]
    if not outside:
        return None
    too_old = any(here[name] < numbers(oldest[name]) for name in outside if name in IMPORTED_BY_ALL)
    spans = {name: " to ".join(dict.fromkeys((oldest[name], newest[name]))) for name in outside}
    said = "; ".join(f"{name} {version_of(name)} is installed and kit is tested with {spans[name]}" for name in outside)
    wanted = " ".join(f"'{name}>={oldest[name]},<={newest[name]}'" for name in outside)
    fix = f"pip install {wanted}; without a network: docs/gpu.md"
    return (failure if too_old else warning)("tested-versions", said, fix)
