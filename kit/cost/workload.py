"""The one description of a candidate plan: what is trained, on what, and how the ranks split the work.

Memory, time, reliability and the planner's rules are functions of it. It is frozen and has a hash, so that what is
worked out for it can be kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One candidate plan."""

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    layout: Layout

    @cached_property
    def _hash(self) -> int:
        return hash((self.model, self.cluster, self.job, self.layout))

    def __hash__(self) -> int:
        return self._hash

    def with_layout(self, layout: Layout) -> Workload:
        """The same work, split otherwise."""
        return replace(self, layout=layout)
