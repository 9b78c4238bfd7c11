"""The files that a run logs to: ``metrics.jsonl``, one line per step, and ``events.jsonl``, one line per event.

Events are spikes, discarded batches and rewinds with the positions of their samples, resumes, failed checkpoints and
stops. A line of metrics describes one step, and the checkpoint after it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kit.cost.model.flops import model_flops_per_token
from kit.errors import RunDirectoryError
from kit.files import complete_file
from kit.planner.plan import Plan
from kit.specs.text_files import open_regular, reason


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of ``metrics.jsonl``. ``loss`` and ``grad_norm`` are over all ranks."""

    step: int
    loss: float
    """Mean loss of the step, nats per token."""
    grad_norm: float | None
    """Gradient norm before clipping; null for a step that fp16's loss scaling skipped."""
    learning_rate: float
    tokens: int
    """Number of labels of this step that are not masked, over all ranks."""
    samples_seen: int
    """Sequences seen since the start of the run, this step included."""
    step_time_s: float
    """Time of reading data, forward, backward and optimizer; without validation and checkpoints."""
    tokens_per_s: float
    """Tokens per second over all devices, of source and target in seq2seq. Padding does not count."""
    mfu: float | None
    """Model FLOPs per second of these tokens, with causal attention within their rows, over the peak of all devices;
    null on CPU processes."""
    validation_loss: float | None = None
    """Nats per token on the validation data; null at steps without validation."""
    validation_losses: Mapping[str, float] | None = None
    """Nats per token on each set of run.data.validation_sets, by its name; null at steps without validation."""
    set_losses: Mapping[str, float] | None = None
    """Mean loss of the step's micro batches that are of one set of run.data.blend, by its name; nats per token. With
    one sequence in a micro batch these are all."""
    grad_norms: Mapping[str, float] | None = None
    """Gradient norm before clipping of each group of parameters (``gradient_norms``); null at steps without."""
    padding_fraction: float | None = None
    """Part of the positions of all micro batches that is padding, and takes time that no token has; 0 in
    pretraining."""
    batch_size: int | None = None
    """Sequences of the step, over all ranks."""
    tokens_per_s_per_gpu: float | None = None
    data_s: float | None = None
    """Time of waiting for data on the slowest rank. Part of step_time_s, like the next two fields."""
    forward_backward_s: float | None = None
    optimizer_s: float | None = None
    loop_s: float | None = None
    """Time between the previous step and this one: metrics, trackers, status all-reduce. Not part of step_time_s."""
    slowest_rank: int | None = None
    """The rank whose own work takes longest compared with the others of its pipeline stage; null in steps without a
    comparison."""
    slowest_rank_ratio: float | None = None
    """Its time over the median of the others."""
    memory_gib: float | None = None
    """Peak memory that torch allocated up to this step's backward, on the GPU with the most; null on CPU processes."""
    loss_scale: float | None = None
    """The loss scale of fp16; null for other precisions."""
    mtp_loss: float | None = None
    """Mean loss of the heads of multi-token prediction, without its factor; null without them."""
    expert_load_max: float | None = None
    """Tokens of a layer's busiest expert over the layer's mean, in the worst layer. This field and the next six are
    null without experts."""
    expert_load_entropy: float | None = None
    """Entropy of the experts' shares of the tokens, over the entropy of even shares, in the worst layer: 1 is even."""
    dead_experts: int | None = None
    """Number of experts, over all layers, that computed no token in this step."""
    dropped_tokens: float | None = None
    """Fraction of the (token, expert) pairs that exceeded an expert's capacity and were dropped."""
    router_aux_loss: float | None = None
    """Auxiliary loss without its coefficient, mean over layers: 1 is even. Null if the job has no balancing loss."""
    router_z_loss: float | None = None
    """The routers' z-loss without its coefficient, mean over layers."""
    expert_bias_range: float | None = None
    """Largest minus smallest expert bias of a layer, in the worst layer; null without such biases."""
    remote_step: int | None = None
    """Newest step whose checkpoint this process has copied to run.checkpoint.remote; null before."""
    event: str | None = None
    """Such as ``loss spike: discarded``; events.jsonl has the details."""
    eta_s: float | None = None
    """Time until the last step, at the recent pace, checkpoints included."""
    checkpoint_s: float | None = None
    """Time that training waited for a checkpoint after this step; null without one. The last field, because it is
    written later."""

    def parts(self, total_steps: int) -> list[str]:
        """What every terminal says of the step."""
        parts = [
            f"step {self.step}/{total_steps}",
            f"loss {self.loss:.4f}",
            (self.event or "overflow, skipped") if self.grad_norm is None else f"grad norm {self.grad_norm:.3g}",
            f"lr {self.learning_rate:.3g}",
        ]
        if self.mfu is not None:
            parts.append(f"MFU {100 * self.mfu:.1f} %")
        if self.padding_fraction:
            parts.append(f"padding {100 * self.padding_fraction:.0f} %")
        return parts


def model_flops_utilisation(plan: Plan, tokens_per_s: float, row_tokens: float) -> float:
    """MFU of so many tokens per second, without padding. ``row_tokens``: tokens of the row of a token, mean over the
    tokens: attention costs as much as in rows of this length, because its cost per token is linear in it.

    The plan's MFU is of rows of seq_length. A token of an encoder-decoder's plan is one of the source and one of the
    target."""
    flops = partial(model_flops_per_token, plan.model, frozen=plan.job.lora is not None)
    work = tokens_per_s / (2 if plan.model.is_encoder_decoder else 1) * flops(seq_length=round(row_tokens))
    return plan.predicted.mfu * work / (plan.predicted.tokens_per_s * flops(seq_length=plan.job.seq_length))


class RunOutput:
    """An output of a run. Subclasses override the methods that they support."""

    def log(self, text: str) -> None:
        """Show a message."""

    def log_event(self, event: str, step: int, **values: Any) -> None:
        """Record an event at a step, with its values."""

    def log_step(self, metrics: StepMetrics, due: bool = True) -> None:
        """Record a step. ``due``: whether a plain terminal prints a line for it."""

    def log_checkpoint(self, step: int, stall_s: float) -> None:
        """Record that training waited ``stall_s`` seconds for a checkpoint after ``step``, the last logged step."""

    def rewind(self, step: int) -> None:
        """Drop the steps after ``step``, which the run will repeat."""

    def close(self) -> None:
        """Write buffered data and release resources."""


_LONGEST_LINE = 1 << 16


class MetricsLog(RunOutput):
    """Appends to ``metrics.jsonl``, and flushes every line.

    The constructor drops the lines after ``resumed_step``, whose steps the run repeats, and an incomplete last line
    after a crash, so that the file has one line per step.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        self._open(resumed_step)

    def _open(self, resumed_step: int) -> None:
        path = self._path
        if path.exists():
            foreign = 0
            try:
                with complete_file(path) as kept:
                    for line, row in logged_rows(path):
                        foreign += row is None
                        if row is not None and row["step"] <= resumed_step:
                            kept.write(f"{line}\n".encode())
            except ValueError as error:
                raise RunDirectoryError(f"{path} cannot be read: {error}; move it away") from None
            if foreign:
                print(f"{foreign} lines of {path} are no steps and were left out")
        try:
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be written: {reason(error)}; mend or remove it") from None

    def log_step(self, metrics: StepMetrics, due: bool = True) -> None:
        """Append one step. On a full disk, prints a warning and keeps the line in memory until the next step."""
        try:
            self._file.write(json.dumps(vars(metrics)) + "\n")
            self._file.flush()
        except OSError as error:
            print(f"metrics of step {metrics.step} are not on disk yet, the run goes on: {error}")

    def log_checkpoint(self, step: int, stall_s: float) -> None:
        """Replace the null at the end of the last line by ``stall_s``, in one write: after a kill the file has either
        value."""
        null = b"null}\n"
        try:
            self._file.flush()
            with open(self._path, "r+b") as file:
                file.seek(-len(null), os.SEEK_END)
                if file.read() == null:
                    file.seek(-len(null), os.SEEK_END)
                    file.write(b"%s}\n" % json.dumps(stall_s).encode())
        except OSError as error:
            print(f"the time of a checkpoint is not on disk, the run goes on: {error}")

    def close(self) -> None:
        """Flush the file to the disk and close it."""
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            print(f"the last lines of {self._path} are lost: {error}; free some space")

    def rewind(self, step: int) -> None:
        """Drop the lines after ``step``."""
        self.close()
        self._open(step)


class EventLog(RunOutput):
    """Appends to ``events.jsonl``, which is never rewritten."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log_event(self, event: str, step: int, **values: Any) -> None:
        """Append one line. On a full disk, prints a warning and drops the line."""
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event, "step": step, **values}
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            print(f"event {event} of step {step} is not on disk: {error}")


def logged_steps(path: Path, step: int, count: int) -> list[tuple[Any, Any]]:
    """(loss, gradient norm) of the last ``count`` steps up to ``step`` in ``metrics.jsonl``. Omits steps that changed
    no weight. Empty without a log."""
    try:
        rows = [row for _, row in logged_rows(path) if row is not None and row["step"] <= step] if step else []
    except (OSError, ValueError):
        return []
    pairs = [(row.get("loss"), row.get("grad_norm")) for row in rows]
    return [pair for pair in pairs if all(isinstance(value, int | float) for value in pair)][-count:]


def missing_steps(path: Path, before: int, last: int) -> str | None:
    """A sentence that names the steps after ``before``, up to ``last``, that ``metrics.jsonl`` lacks; None if it lacks
    none."""
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
    """(line, parsed step) for each line of ``metrics.jsonl``. The step is None for an incomplete or foreign line, of
    which at most 64 kB are read. Raises OSError, and ValueError if ``path`` is not a file."""
    with open_regular(path) as file:
        for raw in iter(lambda: file.readline(_LONGEST_LINE), b""):
            if not (line := raw.decode("utf-8", errors="replace").strip()):
                continue
            try:
                row = json.loads(line)
                yield line, row if type(row["step"]) is int else None
            except (ValueError, LookupError, TypeError, RecursionError):
                yield line, None
