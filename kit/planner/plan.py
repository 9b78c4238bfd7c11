"""The plan, a recipe with every choice made, its predictions and reasons; and the file that stores a plan."""

from __future__ import annotations

import json
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Literal

from kit.cost.estimate import Prediction
from kit.cost.workload import Workload
from kit.errors import SpecError
from kit.files import write_text
from kit.specs import strict_yaml
from kit.specs.cluster import ClusterSpec
from kit.specs.extra import Extra
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from kit.specs.text import shown
from kit.specs.validation import Text, stored

SCHEMA_VERSION = 3


@stored
class Decision:
    """One choice and its reason."""

    rule: Text
    """Name of what was decided: engine, tp, pp, zero_stage, recompute, micro_batch_size, …"""
    chosen: Text
    why: Text
    rejected: tuple[Text, ...] = ()
    """Alternatives, each with what it would cost."""


@stored
class Alternative:
    """The best layout of another engine that fits."""

    layout: Text
    """``describe``'s line."""
    step_time_s: float


@stored
class Plan:
    """Frozen; change it with ``dataclasses.replace``."""

    schema_version: Literal[3] = 3
    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    layout: Layout
    extra: Extra = field(default_factory=Extra)
    """Keys that are merged into the engine's own file, and are not in the prediction."""
    predicted: Prediction
    decisions: tuple[Decision, ...]
    alternatives: tuple[Alternative, ...] = ()
    """Layouts of the other engines; none where the engine is pinned."""

    @cached_property
    def workload(self) -> Workload:
        """The argument of the functions of memory, time and rules."""
        return Workload(model=self.model, cluster=self.cluster, job=self.job, layout=self.layout)

    @property
    def digest(self) -> str:
        """SHA-256 over model, cluster, job, layout and extra: equal means the same computation on the same machines."""
        from hashlib import sha256  # OpenSSL: a plan that is only printed has no digest

        keys = ("model", "cluster", "job", "layout", "extra")
        data = {key: strict_yaml.to_plain(getattr(self, key)) for key in keys}
        return sha256(json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()

    def to_yaml(self) -> str:
        """The text of ``plan.yaml``: one deterministic spelling."""
        return strict_yaml.dump(strict_yaml.to_plain(self))

    def save(self, path: str | Path) -> None:
        """Write the plan as YAML. Raises ``SpecError`` if the file exists or cannot be written."""
        try:
            write_text(Path(path), self.to_yaml(), overwrite=False)
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
        if version != SCHEMA_VERSION:
            raise SpecError(
                f"{document.where(('schema_version',))}: schema_version={shown(version)}; "
                f"this kit reads {SCHEMA_VERSION}: plan again from the recipe"
            )
        return strict_yaml.parse(cls, document.data, document)
