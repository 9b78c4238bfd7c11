"""The files that a run logs to: ``metrics.jsonl``, one line a step, and ``events.jsonl``, one line an event.

Events are spikes, discarded batches and rewinds with the positions of their samples, resumes, checkpoints that failed,
stops. A line of metrics is about its own step, the checkpoint after it included.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.errors import RunDirectoryError
from kit.specs.text_files import open_regular, reason
from kit.units import human_count, human_seconds


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of ``metrics.jsonl``. ``loss`` and ``grad_norm`` are over all ranks."""

    step: int
    loss: float
    """Nats per token."""
    grad_norm: float | None
    """Gradient norm before clipping; null for a step that fp16's loss scaling skipped."""
    learning_rate: float
    tokens: int
    """Labels that counted in this step."""
    samples_seen: int
    """Sequences seen since the start of the run, this step included."""
    step_time_s: float
    """Reading data, forward, backward and optimizer; without validation and checkpoints."""
    tokens_per_s: float
    """Tokens per second over all devices. Every position of every sequence counts."""
    mfu: float | None
    """Causal model FLOPs over the peak of all devices; null where the plan knows no peak."""
    validation_loss: float | None = None
    """Nats per token on the held-out data, at the steps where it was measured."""
    batch_size: int | None = None
    """Sequences of the step, over all ranks."""
    tokens_per_s_per_gpu: float | None = None
    data_s: float | None = None
    """Waiting for data, on the slowest rank: part of step_time_s, as are the next two."""
    forward_backward_s: float | None = None
    optimizer_s: float | None = None
    loop_s: float | None = None
    """Time between the step before and this one: metrics, trackers, agreement. Not part of step_time_s."""
    memory_gib: float | None = None
    """Peak of the fullest GPU up to this step's backward, as allocated by torch; null on CPU processes."""
    loss_scale: float | None = None
    """fp16 alone."""
    expert_load_max: float | None = None
    """Tokens of the fullest expert over the mean of its layer, of the worst layer. This and the next six: of models
    with experts."""
    expert_load_entropy: float | None = None
    """Entropy of an expert's share of the tokens over that of even shares, of the worst layer: 1 is even."""
    dead_experts: int | None = None
    """Experts, of all layers, that no token of the step went to."""
    dropped_tokens: float | None = None
    """Part of the (token, expert) pairs that were over an expert's capacity."""
    router_aux_loss: float | None = None
    """Auxiliary loss without its coefficient, mean over layers: 1 is even; null where nothing is added to the loss."""
    router_z_loss: float | None = None
    """The routers' z-loss without its coefficient, mean over layers."""
    expert_bias_range: float | None = None
    """Largest less smallest expert bias of a layer, of the worst layer; null without such biases."""
    event: str | None = None
    """``loss spike: discarded`` and the like; what events.jsonl says more of."""
    eta_s: float | None = None
    """Time until the last step, at the recent pace, checkpoints included."""
    checkpoint_s: float | None = None
    """How long training stood still for a checkpoint after this step; null without one. Last: it is written later."""

    def line(self, total_steps: int) -> str:
        """One line for the terminal."""
        parts = [
            f"step {self.step}/{total_steps}",
            f"loss {self.loss:.4f}",
            (self.event or "overflow, skipped") if self.grad_norm is None else f"grad norm {self.grad_norm:.3g}",
            f"lr {self.learning_rate:.3g}",
            f"{human_seconds(self.step_time_s)}/step",
            f"{human_count(self.tokens_per_s)} tokens/s",
        ]
        if self.mfu is not None:
            parts.append(f"MFU {100 * self.mfu:.1f} %")
        if self.validation_loss is not None:
            parts.append(f"validation loss {self.validation_loss:.4f}")
        return "  ".join(parts)


class RunOutput:
    """A place that a run logs to; each kind overrides what it shows."""

    def log(self, text: str) -> None:
        """Show a sentence for people."""

    def log_event(self, event: str, step: int, **values: Any) -> None:
        """Record something that happened at a step, with its values."""

    def log_step(self, metrics: StepMetrics, due: bool = True) -> None:
        """Record a step. ``due``: one of those for which a plain terminal prints a line."""

    def log_checkpoint(self, step: int, stall_s: float) -> None:
        """Record how long training stood still for a checkpoint after ``step``, the step that was logged last."""

    def rewind(self, step: int) -> None:
        """Forget the steps after this one: the run makes them again."""

    def close(self) -> None:
        """Write what is left, and free what is held."""


_LONGEST_LINE = 1 << 16


class MetricsLog(RunOutput):
    """Appends to ``metrics.jsonl``; every line is on its way to disk before the next step.

    Opening drops the lines after ``resumed_step``, which will be trained again, and a last line that a crash tore:
    the file has one line a step.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        self._open(resumed_step)

    def _open(self, resumed_step: int) -> None:
        path = self._path
        if path.exists():
            partial, foreign = path.with_name(f".{path.name}.partial"), 0
            try:
                with open(partial, "w", encoding="utf-8") as kept:
                    for line, row in logged_rows(path):
                        foreign += row is None
                        if row is not None and row["step"] <= resumed_step:
                            kept.write(f"{line}\n")
            except ValueError as error:
                partial.unlink()
                raise RunDirectoryError(f"{path} cannot be read: {error}; move it away") from None
            if foreign:
                print(f"{foreign} lines of {path} are no steps and were left out", flush=True)
            partial.replace(path)
        try:
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be written: {reason(error)}; mend or remove it") from None

    def log_step(self, metrics: StepMetrics, due: bool = True) -> None:
        """Append one step. On a full disk the line waits in memory for the next one: a run does not die of it."""
        try:
            self._file.write(json.dumps(vars(metrics)) + "\n")
            self._file.flush()
        except OSError as error:
            print(f"metrics of step {metrics.step} are not on disk yet, the run goes on: {error}", flush=True)

    def log_checkpoint(self, step: int, stall_s: float) -> None:
        """Put a number in the place of the null that ends the last line, in one write: a kill leaves either."""
        null = b"null}\n"
        try:
            self._file.flush()
            with open(self._path, "r+b") as file:
                file.seek(-len(null), os.SEEK_END)
                if file.read() == null:
                    file.seek(-len(null), os.SEEK_END)
                    file.write(b"%s}\n" % json.dumps(stall_s).encode())
        except OSError as error:
            print(f"the time of a checkpoint is not on disk, the run goes on: {error}", flush=True)

    def close(self) -> None:
        """Make the file durable."""
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            print(f"the last lines of {self._path} are lost: {error}; free some space", flush=True)

    def rewind(self, step: int) -> None:
        """Drop the lines after ``step``."""
        self.close()
        self._open(step)


class EventLog(RunOutput):
    """Appends to ``events.jsonl``, which is never rewritten."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log_event(self, event: str, step: int, **values: Any) -> None:
        """Append one line. A disk that is full loses the line, not the run."""
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event, "step": step, **values}
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            print(f"event {event} of step {step} is not on disk: {error}", flush=True)


def logged_steps(path: Path, step: int, count: int) -> list[tuple[Any, Any]]:
    """Loss and gradient norm of the last ``count`` steps up to ``step`` in ``metrics.jsonl``; steps that changed no
    weight are left out. Empty where there is no log."""
    try:
        rows = [row for _, row in logged_rows(path) if row is not None and row["step"] <= step] if step else []
    except (OSError, ValueError):
        return []
    pairs = [(row.get("loss"), row.get("grad_norm")) for row in rows]
    return [pair for pair in pairs if all(isinstance(value, int | float) for value in pair)][-count:]


def missing_steps(path: Path, before: int, last: int) -> str | None:
    """A sentence about the steps after ``before``, up to ``last``, that ``metrics.jsonl`` lacks; None where it has
    them all."""
    missing, why = set(range(before + 1, last + 1)), ""
    try:
        missing -= {row["step"] for _, row in logged_rows(path) if row is not None}
    except (OSError, ValueError) as error:
        why = f" ({error})"
    if not missing:
        return None
    span = f"{min(missing)} to {max(missing)}" if len(missing) > 1 else str(min(missing))
    return (
        f"{path} lacks {len(missing)} of the {last - before} steps of this run{why}, step {span}: these metrics are "
        "lost; check the free space there, and who removes files"
    )


def logged_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Lines of ``metrics.jsonl`` and what they hold: a step, or null for a line that a crash tore or another program
    wrote, of which the first 64 kB are read. Raises OSError, and ValueError for what is no file."""
    with open_regular(path) as file:
        for raw in iter(lambda: file.readline(_LONGEST_LINE), b""):
            if not (line := raw.decode("utf-8", errors="replace").strip()):
                continue
            try:
                row = json.loads(line)
                yield line, row if type(row["step"]) is int else None
            except (ValueError, LookupError, TypeError, RecursionError):
                yield line, None
