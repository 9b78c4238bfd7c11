"""A run's output on a terminal: one line that is updated, or plain lines for files and pipes."""

from __future__ import annotations

import sys
from typing import Any

from kit.cost.estimate import Prediction
from kit.training.logging.metrics import RunOutput, StepMetrics
from kit.units import human_count, human_seconds


class Terminal(RunOutput):
    """Prints plain lines, for files and pipes."""

    def __init__(self, total_steps: int, predicted: Prediction) -> None:
        self._total_steps, self._predicted = total_steps, predicted

    def log_step(self, metrics: StepMetrics, due: bool = True) -> None:
        if due:
            print(plain_line(metrics, self._total_steps))

    def log(self, text: str) -> None:
        print(text)


def terminal(total_steps: int, predicted: Prediction) -> Terminal:
    """A ``LiveLine`` if standard output is a terminal, otherwise plain lines."""
    return (LiveLine if sys.stdout.isatty() else Terminal)(total_steps, predicted)


class LiveLine(Terminal):
    """One line that is updated in place. Messages appear above it."""

    def __init__(self, total_steps: int, predicted: Prediction, console: Any = None) -> None:
        from rich.live import Live

        super().__init__(total_steps, predicted)
        self._live = Live(console=console, refresh_per_second=4, redirect_stdout=True, redirect_stderr=True)
        self._live.start()

    def log_step(self, metrics: StepMetrics, due: bool = True) -> None:
        """Update the line. A thread of rich redraws it four times per second."""
        from rich.text import Text

        self._live.update(Text(live_line(metrics, self._total_steps, self._predicted), no_wrap=False))

    def log(self, text: str) -> None:
        """Print the text above the line."""
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Stop drawing."""
        self._live.stop()


def plain_line(metrics: StepMetrics, total_steps: int) -> str:
    """Text of a line in a file: loss, speed and validation losses."""
    speed = f"{human_seconds(metrics.step_time_s)}/step", f"{human_count(metrics.tokens_per_s)} tokens/s"
    losses = {"validation loss": metrics.validation_loss, **(metrics.validation_losses or {})}
    known = (f"{name} {loss:.4f}" for name, loss in losses.items() if loss is not None)
    return "  ".join([*metrics.parts(total_steps), *speed, *known])


def live_line(metrics: StepMetrics, total_steps: int, predicted: Prediction) -> str:
    """Text of the line: loss, speed, measured and predicted memory, shares of the time, and the remaining time."""
    shares = " ".join(
        f"{name} {100 * seconds / metrics.step_time_s:.0f} %"
        for name, seconds in (
            ("fwd+bwd", metrics.forward_backward_s),
            ("optim", metrics.optimizer_s),
            ("data wait", metrics.data_s),
        )
        if seconds is not None and metrics.step_time_s > 0
    )
    peak, planned = metrics.memory_gib, predicted.peak_gib
    parts = [
        *metrics.parts(total_steps),
        f"{human_count(metrics.tokens_per_s_per_gpu or metrics.tokens_per_s)} tokens/s/GPU",
        f"{planned:.2g} GiB predicted" if peak is None else f"peak {peak:.1f} of {planned:.1f} GiB predicted",
        f"{1000 * metrics.step_time_s:.0f} ms ({shares}; predicted {1000 * predicted.step_time_s:.0f})",
    ]
    if metrics.eta_s is not None:
        parts.append(f"ETA {human_seconds(metrics.eta_s)}")
    return " | ".join(parts)
