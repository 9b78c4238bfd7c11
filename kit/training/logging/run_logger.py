"""All the places that a run logs to, behind one object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.planner.plan import Plan
from kit.specs.run import LoggingSpec
from kit.training.collective import gather, run_collectively
from kit.training.logging.metrics import EventLog, MetricsLog, StepMetrics, logged_steps
from kit.training.logging.prometheus import Prometheus
from kit.training.logging.terminal import Expected, Terminal, terminal
from kit.training.logging.trackers import Trackers


class RunLogger:
    """metrics.jsonl, events.jsonl, terminal, trackers and Prometheus on the main rank; silent on the others."""

    def __init__(
        self, rundir: Path, plan: Plan, logging: LoggingSpec, total_steps: int, resumed_step: int, is_main: bool
    ) -> None:
        """Collective: where the main rank cannot open something, every rank raises CheckpointError with its words."""
        self._targets: tuple[MetricsLog, Terminal, Trackers] | None = None
        self._events: EventLog | None = None
        self._prometheus: Prometheus | None = None
        self._path = rundir / "metrics.jsonl"

        def open_all() -> None:
            if logging.prometheus_port is not None:
                self._prometheus = Prometheus(logging.prometheus_port, logging.prometheus_address, plan, total_steps)
            trackers = Trackers(logging.trackers, rundir, plan, self.log)
            metrics = MetricsLog(self._path, resumed_step)
            expected = Expected(total_steps, plan.predicted.peak_gib, plan.predicted.step_time_s)
            self._targets = metrics, terminal(expected), trackers
            self._events = EventLog(rundir / "events.jsonl")

        run_collectively(is_main, open_all, "opening trackers")

    def log(self, text: str) -> None:
        """A sentence for people, on the terminal."""
        if self._targets is not None:
            self._targets[1].log(text)

    def log_event(self, event: str, step: int, **values: Any) -> None:
        """A line of events.jsonl."""
        if self._events is not None:
            self._events.write(event, step, **values)

    def log_step(self, metrics: StepMetrics, due: bool) -> None:
        """Sends a step's metrics to all outputs but the events. ``due``: plain terminals get a line."""
        if self._targets is None:
            return
        log, screen, trackers = self._targets
        log.write(metrics)
        screen.log_step(metrics, due)
        trackers.log_step(metrics)
        if self._prometheus is not None:
            self._prometheus.log_step(metrics)

    def log_checkpoint(self, step: int, stall_s: float) -> None:
        """How long training stood still for a checkpoint after the step that was logged last."""
        if self._targets is None:
            return
        log, _, trackers = self._targets
        log.add_checkpoint(stall_s)
        trackers.log({"checkpoint_s": stall_s}, step)
        if self._prometheus is not None:
            self._prometheus.log_checkpoint(stall_s)

    def history(self, step: int, count: int) -> list[tuple[float, float | None]]:
        """Collective. ``logged_steps`` as the main rank reads them: a resumed run decides by the same numbers."""
        return gather(logged_steps(self._path, step, count))[0]

    def rewind(self, step: int) -> None:
        """Steps after this one are made again: metrics.jsonl forgets them."""
        if self._targets is not None:
            log, *others = self._targets
            log.close()
            self._targets = MetricsLog(self._path, step), *others  # type: ignore[assignment]

    def close(self) -> None:
        """End all of them."""
        for each in (*(self._targets or ()), self._prometheus):
            if each is not None:
                each.close()
