"""Calibration: corrects predictions with measured runs of a cluster, stored in a file that later plans read.

A residual has the ratio of measured to predicted step time, and the measured minus the predicted peak memory. It holds
for one kind of run: cluster type, engine and implementation, precision, and dense model or model with experts. A kind
without runs takes the time ratio of the most similar kind on the same cluster type, and the plan says so. Otherwise the
search would prefer layouts only because their predictions are uncorrected. Memory is never corrected with another
kind's runs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kit.cost.estimate import Prediction
from kit.cost.memory.peak import StageMemory
from kit.cost.workload import Workload
from kit.errors import SpecError
from kit.files import write_text
from kit.planner.plan import Plan
from kit.specs import strict_yaml
from kit.specs.layout import describe
from kit.specs.text import refuse, shown


class Residual(NamedTuple):
    """Measured against predicted, for one kind of run."""

    step_time_factor: float = 1.0
    """Measured step time divided by the predicted one."""
    extra_gib: float = 0.0
    """Measured minus predicted peak of a GPU, GiB."""
    runs: int = 0
    carried_from: str = ""
    """The kind of run whose ratio is used, if this kind has no runs of its own; else empty."""


_UNKNOWN = Residual()


class Calibration(NamedTuple):
    """Residuals by kind of run."""

    residuals: dict[str, Residual]

    def of(self, workload: Workload) -> Residual:
        """Residual of the workload's kind; else the time ratio of the most similar kind on the same cluster type; else
        no correction."""
        if not self.residuals:  # a search asks this of every layout
            return _UNKNOWN
        if (own := kind(workload)) in self.residuals:
            return self.residuals[own]
        place, *traits = _parts(own)
        near = [name for name in self.residuals if _parts(name)[0] == place]
        if not near:
            return _UNKNOWN
        nearest = max(near, key=lambda name: _likeness(_parts(name)[1:], traits))
        ran = self.residuals[nearest]
        words = ", ".join(_parts(nearest)[1:])
        return Residual(step_time_factor=ran.step_time_factor, runs=ran.runs, carried_from=words)


def _parts(name: str) -> list[str]:
    """Splits a residual's key into cluster, code, precision and kind of model. A cluster's name may contain commas."""
    return name.rsplit(", ", 3)


def _likeness(one: list[str], other: list[str]) -> tuple[bool, ...]:
    """Sort key of similarity: an equal implementation counts most, then precision, kind of model and engine."""
    (engine, code), (own_engine, own_code) = one[0].split(" ", 1), other[0].split(" ", 1)
    return (code == own_code, *(a == b for a, b in zip(one[1:], other[1:], strict=True)), engine == own_engine)


NONE = Calibration({})


def kind(w: Workload) -> str:
    """The key of a residual."""
    what = "experts" if w.model.num_experts else "dense"
    place = f"{w.cluster.name} {w.cluster.gpu.name}"
    return f"{place}, {w.layout.engine} {w.layout.implementation}, {w.job.precision}, {what}"


def load(path: str | Path | None) -> Calibration:
    """Reads the residuals of earlier runs; none if ``path`` is None. Raises ``SpecError``."""
    if path is None:
        return NONE
    try:
        data = strict_yaml.read(Path(path)).data
        return Calibration({str(name): _residual(row) for name, row in data.items()})
    except (SpecError, TypeError, AttributeError, LookupError, ValueError, OverflowError) as error:
        raise SpecError(f"{path} cannot be read as calibration: {error}; mend it, or name another file") from None


def _residual(row: dict[str, Any]) -> Residual:
    """A row of the file. Raises ``ValueError``, ``TypeError``."""
    found = Residual(float(row["step_time_factor"]), float(row["extra_gib"]), int(row["runs"]))
    if not (0 < found.step_time_factor < math.inf and math.isfinite(found.extra_gib) and found.runs > 0):
        raise ValueError(f"{row} is not a ratio above 0, GiB and a number of runs")
    return found


def learn(plan: Plan, measurements: Path, known: Calibration) -> Calibration:
    """``known`` with the residual of one more run of ``plan``; runs of the same kind are averaged.

    ``measurements``: a run's summary.json, or a JSON object with measured_step_time_s and measured_memory_gib. The
    predictions in ``plan`` must be uncalibrated. Raises ``SpecError``.
    """
    data = strict_yaml.read(measurements).data  # which reads JSON too
    seconds, gib = (_positive(data, name, measurements) for name in ("measured_step_time_s", "measured_memory_gib"))
    if data.get("measured_memory_is") not in (None, "peak allocated"):
        gib = None  # a CPU run does not measure a GPU's peak
    if not seconds and not gib:
        raise SpecError(
            f"{measurements} has neither measured_step_time_s nor a measured peak; use a run's summary.json"
        )
    _plausible(plan, seconds, gib, measurements)
    key = kind(plan.workload)
    before = known.residuals.get(key, Residual())
    share = 1 / (before.runs + 1)
    factor = seconds / plan.predicted.step_time_s if seconds else before.step_time_factor
    extra = gib - plan.predicted.peak_gib if gib else before.extra_gib
    after = Residual(
        step_time_factor=before.step_time_factor + share * (factor - before.step_time_factor),
        extra_gib=before.extra_gib + share * (extra - before.extra_gib),
        runs=before.runs + 1,
    )
    return Calibration({**known.residuals, key: after})


_FARTHEST = 20.0
"""A run this many times faster or slower than predicted cannot be a run of the plan."""


def _plausible(plan: Plan, seconds: float | None, gib: float | None, path: Path) -> None:
    """Raises ``SpecError`` if the measurements cannot be of this plan. CPU runs are not checked."""
    if plan.cluster.gpu.device != "cuda":
        return
    predicted = plan.predicted.step_time_s
    fix = "lay the file beside the plan.yaml of its run, or name the run's own recipe"
    reasons = {
        f"{path}: measured_step_time_s={seconds or 0:g}, and {describe(plan.layout)} is predicted to take "
        f"{predicted:.3g}: a run of another plan? {fix}": (
            seconds and not 1 / _FARTHEST < seconds / predicted < _FARTHEST
        ),
        f"{path}: measured_memory_gib={gib or 0:g} is more than the {plan.cluster.gpu.memory_gib:.1f} GiB of "
        f"{plan.cluster.gpu.name}: a run of another plan? {fix}": gib and gib > plan.cluster.gpu.memory_gib,
    }
    refuse(reasons)


def _positive(data: dict[str, Any], name: str, path: Path) -> float | None:
    """A measured number, or None if it is missing. Raises ``SpecError``."""
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SpecError(f"{path}: {name}={shown(value)} is not a measurement; use a number above 0, or leave it out")
    return float(value)


def save(calibration: Calibration, path: Path) -> None:
    """Writes the residuals; replaces the whole file."""
    kept = ("extra_gib", "runs", "step_time_factor")
    rows = {name: {key: getattr(row, key) for key in kept} for name, row in sorted(calibration.residuals.items())}
    write_text(path, strict_yaml.dump(rows))


def corrected(prediction: Prediction, residual: Residual) -> Prediction:
    """Applies a residual to a prediction."""
    if residual == Residual():
        return prediction
    factor, own = residual.step_time_factor, not residual.carried_from
    runs = f"{residual.runs} run{'s' if residual.runs > 1 else ''}" + ("" if own else f" of {residual.carried_from}")
    changed_gib = f"{residual.extra_gib:+.1f} GiB" if own else "memory as predicted"
    memory = tuple(
        StageMemory(
            stage=stage.stage,
            components_gib=stage.components_gib
            | {"overhead": stage.components_gib.get("overhead", 0.0) + residual.extra_gib},
        )
        for stage in prediction.memory
    )
    return replace(
        prediction,
        memory=memory,
        step_time_s=prediction.step_time_s * factor,
        step_time_components_s={name: value * factor for name, value in prediction.step_time_components_s.items()},
        tokens_per_s=prediction.tokens_per_s / factor,
        mfu=prediction.mfu / factor,
        days=None if prediction.days is None else prediction.days * factor,
        cost_usd=None if prediction.cost_usd is None else prediction.cost_usd * factor,
        step_time_evidence=f"{_CALIBRATED} by {runs} on this cluster: step x {factor:.2f}, {changed_gib}",
    )


_CALIBRATED = "calibrated"


def is_corrected(prediction: Prediction) -> bool:
    """Whether a prediction was corrected by a residual."""
    return prediction.step_time_evidence.startswith(_CALIBRATED)
