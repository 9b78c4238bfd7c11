"""The next best layouts, and what separates each from the best."""

from __future__ import annotations

from collections.abc import Iterable

from kit.cost.step_time import StepTimer
from kit.planner.describe import describe
from kit.planner.plan import Decision
from kit.planner.weighing import Candidate, step_s
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec

MOST_ALTERNATIVES = 4
WORTH_NAMING = 0.003
"""Share of a step below which a difference in one component is not named."""


def alternatives(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, considered: Iterable[Candidate], best: Candidate
) -> Decision | None:
    """Fitting layouts that split the work otherwise, the fastest first; null where there is none."""
    timer = StepTimer(model, cluster, job)
    seen = {split_of(best.layout)}
    rejected = []
    for candidate in sorted((c for c in considered if c.step_time_s is not None), key=step_s):
        if split_of(candidate.layout) in seen:
            continue
        seen.add(split_of(candidate.layout))
        rejected.append(f"{describe(candidate.layout)}: {_difference(timer, best, candidate)}")
        if len(rejected) == MOST_ALTERNATIVES:
            break
    if not rejected:
        return None
    return Decision(
        rule="next", chosen=describe(best.layout), why="the next best ways to split the work", rejected=tuple(rejected)
    )


def split_of(layout: Layout) -> tuple[object, ...]:
    """What two layouts must share to be one way to split the work."""
    return (layout.engine, layout.tp, layout.pp, layout.cp, layout.ep, layout.zero_stage, layout.offload_optimizer)


def _difference(timer: StepTimer, best: Candidate, other: Candidate) -> str:
    """``+3.2 %: pipeline bubble +2.1 %, tensor parallel −1.0 %; −4.1 GiB``."""
    step = step_s(best)
    ours, theirs = (_components_s(timer, candidate) for candidate in (best, other))
    shares = {name: (theirs[name] - ours[name]) / step for name in ours}
    largest = sorted((name for name in shares if abs(shares[name]) >= WORTH_NAMING), key=lambda n: -abs(shares[n]))[:3]
    parts = ", ".join(f"{name.replace('_', ' ')} {shares[name]:+.1%}" for name in largest)
    memory = other.peak_gib - best.peak_gib
    return f"{step_s(other) / step - 1:+.1%} a step" + (f" ({parts})" if parts else "") + f", {memory:+.1f} GiB"


def _components_s(timer: StepTimer, candidate: Candidate) -> dict[str, float]:
    """As the candidate was weighed: with what calibration makes of its step."""
    components = timer.components_s(candidate.layout)
    factor = step_s(candidate) / sum(components.values())
    return {name: factor * seconds for name, seconds in components.items()}
