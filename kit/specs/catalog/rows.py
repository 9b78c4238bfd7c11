"""The data files beside this module."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kit.specs import yaml


@cache
def rows(name: str) -> Mapping[str, dict[str, Any]]:
    """The rows of ``<name>.yaml``, by key, in file order. Treat them as read-only: they are shared."""
    return yaml.read(Path(__file__).with_name(f"{name}.yaml")).data
