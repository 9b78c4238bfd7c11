"""Plans as files: strict YAML, one deterministic spelling, and a hash of what decides the run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kit.errors import SpecError
from kit.planner.plan import SCHEMA_VERSION, Plan
from kit.specs import yaml


def plan_to_yaml(plan: Plan) -> str:
    """The text of ``plan.yaml``."""
    return yaml.dump(yaml.to_plain(plan))


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan; an existing file is not overwritten. Raises ``SpecError``."""
    try:
        with Path(path).open("x", encoding="utf-8") as stream:
            stream.write(plan_to_yaml(plan))
    except FileExistsError:
        raise SpecError(
            f"{path} exists already and is not overwritten; choose another name, or remove it yourself"
        ) from None
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}") from None


def load_plan(path: str | Path) -> Plan:
    """Read what ``save_plan`` wrote, every value validated again. Raises ``SpecError``."""
    document = yaml.read(Path(path))
    version = document.data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise SpecError(
            f"{document.where(('schema_version',))}: schema_version={version!r}; "
            f"this kit reads {SCHEMA_VERSION}: plan again"
        )
    return yaml.parse(Plan, document.data, document)


def plan_hash(plan: Plan) -> str:
    """SHA-256 over model, cluster, job and layout: equal hashes mean the same computation on the same machines."""
    decisive = {key: yaml.to_plain(getattr(plan, key)) for key in ("model", "cluster", "job", "layout")}
    canonical = json.dumps(decisive, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
