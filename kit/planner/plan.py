"""The plan, a recipe with every choice made, its predictions and reasons; and the file that stores a plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kit.cost.prediction import Prediction, StageMemory
from kit.cost.workload import Workload
from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.base import SPEC, Text
from kit.specs.cluster import ClusterSpec
from kit.specs.job import ADDED_TO_JOB, JobSpec
from kit.specs.layout import ADDED, DEFAULTS, ZERO_KEYS, Layout, Pins
from kit.specs.model import ModelSpec

SCHEMA_VERSION = 3
"""Plans of version 2 have no sizes of DeepSpeed's buffers in their layout. For them kit chooses the sizes as it did
when version 2 was current."""

__all__ = ["SCHEMA_VERSION", "Decision", "Layout", "Pins", "Plan", "Prediction", "StageMemory"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One choice and its reason."""

    __pydantic_config__ = SPEC  # where one is read from a file

    rule: Text
    """Name of what was decided: engine, tp, pp, zero_stage, recompute, micro_batch_size, …"""
    chosen: Text
    why: Text
    rejected: tuple[Text, ...] = ()
    """Alternatives, each with what it would cost."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Frozen; change it with ``dataclasses.replace``."""

    __pydantic_config__ = SPEC  # where one is read from a file

    schema_version: Literal[3] = 3
    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    layout: Layout
    predicted: Prediction
    decisions: tuple[Decision, ...]

    @cached_property
    def workload(self) -> Workload:
        """The argument of the functions of memory, time and rules."""
        return Workload(model=self.model, cluster=self.cluster, job=self.job, layout=self.layout)

    @property
    def digest(self) -> str:
        """SHA-256 over model, cluster, job and layout: equal means the same computation on the same machines."""
        decisive = {key: strict_yaml.to_plain(getattr(self, key)) for key in ("model", "cluster", "job", "layout")}
        del decisive["cluster"]["gpu"]["generation"]  # of the GPU's name; plans of version 2 do not say it
        return _digest(_written(decisive))

    @property
    def model_digest(self) -> str:
        """SHA-256 over the model's shape: equal means the same tensors, whatever the model is called."""
        shape = _written_model(strict_yaml.to_plain(self.model))
        return _digest({key: value for key, value in shape.items() if key not in ("name", "source")})

    def to_yaml(self) -> str:
        """The text of ``plan.yaml``: one deterministic spelling."""
        return strict_yaml.dump(_written(strict_yaml.to_plain(self)))

    def save(self, path: str | Path) -> None:
        """Write the plan as YAML. Raises ``SpecError`` if the file exists or cannot be written."""
        try:
            with Path(path).open("x", encoding="utf-8") as stream:
                stream.write(self.to_yaml())
        except FileExistsError:
            raise SpecError(
                f"{path} exists already and is not overwritten; choose another name, or remove it yourself"
            ) from None
        except OSError as error:
            raise SpecError(f"{path} cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what ``save`` wrote, every value validated again. Raises ``SpecError``."""
        document = strict_yaml.read(Path(path))
        version = document.data.get("schema_version")
        if version not in (2, SCHEMA_VERSION):
            raise SpecError(
                f"{document.where(('schema_version',))}: schema_version={version!r}; "
                f"this kit reads 2 and {SCHEMA_VERSION}: plan again"
            )
        return strict_yaml.parse(cls, document.data | {"schema_version": SCHEMA_VERSION}, document)


def _written(plan: dict[str, Any]) -> dict[str, Any]:
    """Drops sizes that the engine does not read, and defaults of fields that plans of this version may lack: a plan
    keeps its digest when kit learns a new field."""
    layout = {
        name: value
        for name, value in plan["layout"].items()
        if not (value is None and name in ZERO_KEYS) and not (name in ADDED and value == DEFAULTS[name])
    }
    for (*parents, name), default in ADDED_TO_JOB.items():
        owner = plan["job"]
        for parent in parents:
            owner = owner[parent] or {}
        if owner.get(name) == default:
            owner.pop(name, None)
    return plan | {"layout": layout, "model": _written_model(plan["model"])}


def _written_model(model: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if (name, value) != ("mtp_num_layers", 0)}


def _digest(data: dict[str, Any]) -> str:
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    from hashlib import sha256  # OpenSSL: a plan that is only printed has no digest

    return sha256(canonical.encode()).hexdigest()
