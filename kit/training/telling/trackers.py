"""TensorBoard, Weights & Biases, MLflow and Trackio, through accelerate's trackers: each is one class there."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kit.errors import EngineError
from kit.planner.plan import Plan
from kit.training.metrics import StepMetrics

FOLDER = "trackers"
"""In the run directory: what is kept on disk."""


class Trackers:
    """Those of one run, on the main rank. One that fails while training is dropped with a word; the run goes on."""

    def __init__(self, names: Sequence[str], rundir: Path, plan: Plan, say: Callable[[str], None] = print) -> None:
        """Raises EngineError where a tracker's package is not installed, or it cannot start."""
        self._say = say
        self._live: dict[str, Any] = {}
        for name in names:
            self._live[name] = _start(name, rundir, plan)

    def step(self, metrics: StepMetrics) -> None:
        """All numbers of a step."""
        if not self._live:
            return
        values = {f"train/{key}": value for key, value in dataclasses.asdict(metrics).items() if _is_number(value)}
        for name, tracker in list(self._live.items()):
            try:
                tracker.log(values, step=metrics.step)
            except Exception as error:  # a tracker's server may raise anything
                self._say(f"tracker {name} failed at step {metrics.step} and is left out from here on: {error!r}")
                del self._live[name]

    def close(self) -> None:
        """Send what is left."""
        for name, tracker in self._live.items():
            try:
                tracker.finish()
            except Exception as error:
                self._say(f"tracker {name} could not be closed: {error!r}")
        self._live = {}


PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


def missing(names: Sequence[str]) -> list[str]:
    """Packages of these trackers that are not installed."""
    return [PACKAGES[name] for name in names if importlib.util.find_spec(PACKAGES[name]) is None]


def _start(name: str, rundir: Path, plan: Plan) -> Any:
    from accelerate import tracking

    if absent := missing([name]):
        raise EngineError(
            f"run.logging.trackers names {name}, which needs the package {absent[0]}; install it, or leave {name} out"
        )
    folder = rundir / FOLDER
    project = plan.model.name
    classes: dict[str, Callable[[], Any]] = {
        "tensorboard": lambda: tracking.TensorBoardTracker(rundir.name, logging_dir=str(folder / "tensorboard")),
        # Without a login it writes to disk only: WANDB_MODE=offline, for ``wandb sync`` later.
        "wandb": lambda: tracking.WandBTracker(project, name=rundir.name, dir=str(folder)),
        # Where MLFLOW_TRACKING_URI is not set, mlflow keeps a store in the working directory: the run directory.
        "mlflow": lambda: tracking.MLflowTracker(experiment_name=project, run_name=rundir.name),
        "trackio": lambda: tracking.TrackioTracker(project, name=rundir.name),
    }
    try:
        folder.mkdir(exist_ok=True)
        tracker = classes[name]()
        tracker.start()
        if name != "tensorboard":  # whose writer would open a second run for the settings
            tracker.store_init_configuration(_settings(plan))
    except Exception as error:
        raise EngineError(
            f"tracker {name} does not start: {' '.join(str(error).split())}; mend it, or leave it out of "
            f"run.logging.trackers"
        ) from error
    return tracker


def _settings(plan: Plan) -> dict[str, Any]:
    layout = {f"layout/{key}": value for key, value in dataclasses.asdict(plan.layout).items()}
    predicted = {"predicted/peak_gib": plan.predicted.peak_gib, "predicted/step_time_s": plan.predicted.step_time_s}
    flat = {"model": plan.model.name, "cluster": plan.cluster.name, "plan": plan.digest[:12], **layout, **predicted}
    return {key: value if isinstance(value, (str, int, float, bool)) else str(value) for key, value in flat.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
