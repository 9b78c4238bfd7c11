"""All the places that a step is told to, behind one call."""

from __future__ import annotations

from pathlib import Path

from kit.planner.plan import Plan
from kit.specs.run import LoggingSpec
from kit.training.checkpoint.collective import together
from kit.training.logging.metrics import MetricsLog, StepMetrics
from kit.training.logging.prometheus import Prometheus
from kit.training.logging.terminal import Expected, Terminal, terminal
from kit.training.logging.trackers import Trackers


class Teller:
    """metrics.jsonl, terminal, trackers and Prometheus on the main rank; silent on the others."""

    def __init__(
        self, rundir: Path, plan: Plan, logging: LoggingSpec, total_steps: int, resumed_step: int, is_main: bool
    ) -> None:
        """Collective: where the main rank cannot open something, every rank raises CheckpointError with its words."""
        self._log: MetricsLog | None = None
        self._terminal: Terminal | None = None
        self._trackers: Trackers | None = None
        self._prometheus: Prometheus | None = None
        self._path = rundir / "metrics.jsonl"

        def open_all() -> None:
            if logging.prometheus_port is not None:
                self._prometheus = Prometheus(logging.prometheus_port, logging.prometheus_address, plan, total_steps)
            self._trackers = Trackers(logging.trackers, rundir, plan, self.say)
            self._log = MetricsLog(self._path, resumed_step)
            self._terminal = terminal(Expected(total_steps, plan.predicted.peak_gib, plan.predicted.step_time_s))

        together(is_main, open_all, "opening trackers")

    def say(self, text: str) -> None:
        """A sentence for people."""
        if self._terminal is not None:
            self._terminal.say(text)

    def step(self, metrics: StepMetrics, due: bool) -> None:
        """To all of them; ``due``: plain terminals get a line."""
        if self._log is None or self._terminal is None or self._trackers is None:
            return
        self._log.write(metrics)
        self._terminal.step(metrics, due)
        self._trackers.step(metrics)
        if self._prometheus is not None:
            self._prometheus.step(metrics)

    def rewind(self, step: int) -> None:
        """Steps after this one are made again: metrics.jsonl forgets them."""
        if self._log is not None:
            self._log.close()
            self._log = MetricsLog(self._path, step)

    def close(self) -> None:
        """End all of them."""
        for each in (self._log, self._terminal, self._trackers, self._prometheus):
            if each is not None:
                each.close()
