"""What a cluster's own runs say of the predictions: a residual a kind of run, kept in a file that later plans read.

A residual belongs to one cluster type, engine and implementation, precision and kind of model (dense or with experts):
the ratio of the measured step time to the predicted one, and the memory measured beyond the predicted peak. It is not
carried over to other kinds.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml as pyyaml

from kit.cost.prediction import Prediction, StageMemory
from kit.errors import SpecError
from kit.planner.plan import Plan
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from kit.units import SECONDS_PER_DAY, SECONDS_PER_HOUR

FILE = "kit-calibration.yaml"
"""In the working directory, or where KIT_CALIBRATION says."""


@dataclass(frozen=True)
class Residual:
    """Of one kind of run."""

    step_time_factor: float = 1.0
    """Measured over predicted."""
    extra_gib: float = 0.0
    """Measured less predicted peak of a GPU."""
    runs: int = 0


@dataclass(frozen=True)
class Calibration:
    """Residuals by kind."""

    residuals: dict[str, Residual]
    path: Path | None = None

    def of(self, model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> Residual:
        """Nothing to correct where no run of the kind is known."""
        return self.residuals.get(kind(model, cluster, job, layout), Residual())


NONE = Calibration({})


def kind(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str:
    """The key of a residual."""
    what = "experts" if model.num_experts else "dense"
    return f"{cluster.name} {cluster.gpu.name}, {layout.engine} {layout.implementation}, {job.precision}, {what}"


def file_path() -> Path:
    """Where residuals are kept."""
    return Path(os.environ.get("KIT_CALIBRATION", FILE))


def load(path: Path | None = None) -> Calibration:
    """Residuals of earlier runs; none where the file does not exist. Raises ``SpecError``."""
    path = path or file_path()
    if not path.exists():
        return NONE
    try:
        data = pyyaml.safe_load(path.read_text(encoding="utf-8")) or {}
        return Calibration({name: Residual(**row) for name, row in data.items()}, path)
    except (OSError, pyyaml.YAMLError, TypeError, AttributeError) as error:
        raise SpecError(f"{path} cannot be read as calibration: {error}; mend it, or remove it yourself") from None


def learn(plan: Plan, measurements: Path, known: Calibration) -> Calibration:
    """``known`` with the residual of a run of ``plan``; measurements of the same kind are averaged.

    ``measurements``: a run's summary.json (measured_step_time_s, measured_memory_gib), or a JSON object of these.
    ``plan`` is as predicted without calibration. Raises ``SpecError``.
    """
    data = _read(measurements)
    seconds, gib = data.get("measured_step_time_s"), data.get("measured_memory_gib")
    if data.get("measured_memory_is") not in (None, "peak allocated"):
        gib = None  # what a CPU run counts is not a GPU's peak
    if not seconds and not gib:
        raise SpecError(
            f"{measurements} has neither measured_step_time_s nor a measured peak; use a run's summary.json"
        )
    key = kind(plan.model, plan.cluster, plan.job, plan.layout)
    before = known.residuals.get(key, Residual())
    share = 1 / (before.runs + 1)
    factor = float(seconds) / plan.predicted.step_time_s if seconds else before.step_time_factor
    extra = float(gib) - plan.predicted.peak_gib if gib else before.extra_gib
    after = Residual(
        step_time_factor=before.step_time_factor + share * (factor - before.step_time_factor),
        extra_gib=before.extra_gib + share * (extra - before.extra_gib),
        runs=before.runs + 1,
    )
    return Calibration({**known.residuals, key: after}, known.path)


def save(calibration: Calibration, path: Path | None = None) -> Path:
    """Write residuals; the file is ours and is replaced whole."""
    path = path or file_path()
    text = pyyaml.safe_dump({name: vars(row) for name, row in sorted(calibration.residuals.items())}, sort_keys=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


def corrected(prediction: Prediction, residual: Residual, total_tokens: int, usd_per_hour: float | None) -> Prediction:
    """A prediction with its residual; ``usd_per_hour`` is for all nodes."""
    if residual == Residual():
        return prediction
    factor = residual.step_time_factor
    tokens_per_s = prediction.tokens_per_s / factor
    seconds = total_tokens / tokens_per_s
    words = f"calibrated by {residual.runs} run{'s' if residual.runs > 1 else ''} on this cluster: step x {factor:.2f}"
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
        tokens_per_s=tokens_per_s,
        mfu=prediction.mfu / factor,
        days=seconds / SECONDS_PER_DAY,
        cost_usd=None if usd_per_hour is None else usd_per_hour * seconds / SECONDS_PER_HOUR,
        step_time_evidence=f"{words}, {residual.extra_gib:+.1f} GiB",
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} cannot be read as JSON: {error}; use a run's summary.json") from None
    if not isinstance(data, dict):
        raise SpecError(f"{path} is not a JSON object; use a run's summary.json")
    return data
