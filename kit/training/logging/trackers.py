"""TensorBoard, Weights & Biases, MLflow and Trackio, through accelerate's tracker classes."""

from __future__ import annotations

import dataclasses
import importlib.util
import netrc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.errors import EngineError
from kit.planner.plan import Plan
from kit.training.logging.metrics import RunOutput, StepMetrics

FOLDER = "trackers"
"""Folder of the run directory for trackers that write to disk."""


class Trackers(RunOutput):
    """Trackers of one run, on the main rank. If a tracker fails during training, kit reports it, drops the tracker and
    continues."""

    def __init__(self, names: Sequence[str], rundir: Path, plan: Plan, warn: Callable[[str], None] = print) -> None:
        """Raises EngineError if a tracker's package is not installed, or if a tracker cannot start."""
        self._warn = warn
        self._live = {name: _start(name, rundir, plan) for name in names}

    def log_step(self, metrics: StepMetrics, due: bool = True) -> None:
        """Log all numbers of a step."""
        if self._live:
            self._log_numbers(dataclasses.asdict(metrics), metrics.step)

    def log_checkpoint(self, step: int, stall_s: float) -> None:
        self._log_numbers({"checkpoint_s": stall_s}, step)

    def _log_numbers(self, values: Mapping[str, Any], step: int) -> None:
        """Log the values that are numbers, and those of mappings as ``key/name``."""
        flat = dict(values)
        for key, inner in values.items():
            flat |= {f"{key}/{name}": value for name, value in inner.items()} if isinstance(inner, Mapping) else {}
        numbers = {f"train/{key}": value for key, value in flat.items() if _is_number(value)}
        for name, tracker in list(self._live.items()):
            try:
                tracker.log(numbers, step=step)
            except Exception as error:  # a tracker's server may raise anything
                self._warn(f"tracker {name} failed at step {step} and is left out from here on: {error!r}")
                del self._live[name]

    def close(self) -> None:
        """Send buffered data and close the trackers."""
        for name, tracker in self._live.items():
            try:
                tracker.finish()
            except Exception as error:
                self._warn(f"tracker {name} could not be closed: {error!r}")
        self._live = {}


PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


def missing(names: Sequence[str]) -> list[str]:
    """Names of the packages of these trackers that are not installed."""
    return [PACKAGES[name] for name in names if importlib.util.find_spec(PACKAGES[name]) is None]


def _start(name: str, rundir: Path, plan: Plan) -> Any:
    from accelerate import PartialState, tracking  # type: ignore[import-untyped]

    if absent := missing([name]):
        raise EngineError(
            f"run.logging.trackers names {name}, which needs the package {absent[0]}; install it, or leave {name} out"
        )
    folder = rundir / FOLDER
    project = plan.model.name
    classes: dict[str, Callable[[], Any]] = {
        "tensorboard": lambda: tracking.TensorBoardTracker(rundir.name, logging_dir=str(folder / "tensorboard")),
        # Offline mode writes to disk, for ``wandb sync`` later. Without a login wandb would ask a question, which a
        # batch job cannot answer.
        "wandb": lambda: tracking.WandBTracker(project, name=rundir.name, dir=str(folder), mode=_wandb_mode()),
        "mlflow": lambda: tracking.MLflowTracker(experiment_name=project, run_name=rundir.name),
        "trackio": lambda: tracking.TrackioTracker(project, name=rundir.name),
    }
    try:
        folder.mkdir(exist_ok=True)
        # Local files go to the run directory, unless these variables are set already.
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
        # accelerate's trackers use its logger, which needs PartialState to know the main rank.
        PartialState(cpu=plan.cluster.gpu.device == "cpu")
        tracker = classes[name]()
        tracker.start()
        if name != "tensorboard":  # its writer would open a second run for the settings
            tracker.store_init_configuration(_settings(plan))
    except Exception as error:
        raise EngineError(
            f"tracker {name} does not start: {' '.join(str(error).split())}; mend it, or leave it out of "
            f"run.logging.trackers"
        ) from error
    return tracker


def _wandb_mode() -> str:
    """WANDB_MODE if it is set; otherwise ``online`` with a login and ``offline`` without."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    if "WANDB_API_KEY" in os.environ:
        return "online"
    try:
        return "online" if netrc.netrc().authenticators("api.wandb.ai") else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"


def _settings(plan: Plan) -> dict[str, Any]:
    layout = {f"layout/{key}": value for key, value in dataclasses.asdict(plan.layout).items()}
    predicted = {"predicted/peak_gib": plan.predicted.peak_gib, "predicted/step_time_s": plan.predicted.step_time_s}
    flat = {"model": plan.model.name, "cluster": plan.cluster.name, "plan": plan.digest[:12], **layout, **predicted}
    return {key: value if isinstance(value, (str, int, float, bool)) else str(value) for key, value in flat.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
