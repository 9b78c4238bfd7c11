"""Combines all outputs of a run in one object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.engines.collective import gather, on_all_ranks
from kit.planner.plan import Plan
from kit.specs.run import LoggingSpec
from kit.training.logging.metrics import EventLog, MetricsLog, RunOutput, StepMetrics, logged_steps, missing_steps
from kit.training.logging.prometheus import Prometheus
from kit.training.logging.terminal import terminal
from kit.training.logging.trackers import Trackers


class RunLogger(RunOutput):
    """Logs to metrics.jsonl, events.jsonl, terminal, trackers and Prometheus on the main rank; no-op on other ranks."""

    def __init__(
        self, rundir: Path, plan: Plan, logging: LoggingSpec, total_steps: int, resumed_step: int, is_main: bool
    ) -> None:
        """Collective. If the main rank cannot open an output, every rank raises CheckpointError with the main rank's
        message."""
        self._outputs: list[RunOutput] = []
        self._path, self._resumed_step = rundir / "metrics.jsonl", resumed_step

        def open_all() -> None:
            served: list[RunOutput] = []
            if logging.prometheus_port is not None:
                served = [Prometheus(logging.prometheus_port, logging.prometheus_address, plan, total_steps)]
            trackers = Trackers(logging.trackers, rundir, plan, self.log)
            files = (MetricsLog(self._path, resumed_step), EventLog(rundir / "events.jsonl"))
            self._outputs += [*files, terminal(total_steps, plan.predicted), trackers, *served]

        on_all_ranks(is_main, open_all, "opening trackers")

    def history(self, step: int, count: int) -> list[tuple[float, float | None]]:
        """Collective. The main rank's ``logged_steps``, on all ranks, so that all ranks decide by equal numbers."""
        return gather(logged_steps(self._path, step, count))[0]

    def unsaved(self, last_step: int) -> str | None:
        """Collective. The steps of this process that ``metrics.jsonl`` lacks, in words; None if it lacks none. Only the
        main rank reads the file."""
        return gather(missing_steps(self._path, self._resumed_step, last_step) if self._outputs else None)[0]

    def log(self, text: str) -> None:
        for each in self._outputs:
            each.log(text)

    def log_event(self, event: str, step: int, **values: Any) -> None:
        for each in self._outputs:
            each.log_event(event, step, **values)

    def log_step(self, metrics: StepMetrics, due: bool = True) -> None:
        for each in self._outputs:
            each.log_step(metrics, due)

    def log_checkpoint(self, step: int, stall_s: float) -> None:
        for each in self._outputs:
            each.log_checkpoint(step, stall_s)

    def rewind(self, step: int) -> None:
        for each in self._outputs:
            each.rewind(step)

    def close(self) -> None:
        for each in self._outputs:
            each.close()
