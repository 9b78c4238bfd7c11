"""The plan: a recipe with every choice made, what is predicted of it, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from kit.cost.prediction import Prediction, StageMemory
from kit.specs.base import SPEC
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout, Pins
from kit.specs.model import ModelSpec

SCHEMA_VERSION = 1

__all__ = ["SCHEMA_VERSION", "Decision", "Layout", "Pins", "Plan", "Prediction", "StageMemory"]


@dataclass(frozen=True, kw_only=True, config=SPEC)
class Decision:
    """One choice and its reason."""

    rule: str
    """Name of what was decided: engine, tp, pp, zero_stage, recompute, micro_batch_size, …"""
    chosen: str
    why: str
    rejected: tuple[str, ...] = ()
    """Alternatives, each with what it would cost."""


@dataclass(frozen=True, kw_only=True, config=SPEC)
class Plan:
    """Frozen; change it with ``dataclasses.replace``, which validates again."""

    schema_version: Literal[1] = 1
    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    layout: Layout
    predicted: Prediction
    decisions: tuple[Decision, ...]

    def save(self, path: str | Path) -> None:
        """Write it as YAML; see ``kit.planner.io.save_plan``."""
        from kit.planner.io import save_plan

        save_plan(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what ``save`` wrote; see ``kit.planner.io.load_plan``."""
        from kit.planner.io import load_plan

        return load_plan(path)
