"""The input of a search: model, cluster, job, pins, and the calibration from earlier runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from kit.cost.workload import Workload
from kit.planner.calibration import NONE, Calibration
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout, Pins
from kit.specs.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Request:
    """The input of a search."""

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    pins: Pins = field(default_factory=Pins)
    calibration: Calibration = NONE

    def workload(self, layout: Layout) -> Workload:
        """The candidate plan with ``layout``."""
        return Workload(model=self.model, cluster=self.cluster, job=self.job, layout=layout)
