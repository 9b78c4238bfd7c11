"""The end of a run: ``summary.json`` with measured and predicted values."""

from __future__ import annotations

import dataclasses
import platform
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kit.engines.collective import gather, on_all_ranks
from kit.engines.protocol import Engine
from kit.planner.plan import Plan
from kit.training.checkpoint import storage
from kit.training.checkpoint.files import write_json
from kit.training.checkpoint.manager import CheckpointManager
from kit.training.counters import Counters
from kit.training.logging.run_logger import RunLogger
from kit.training.stopping import Reason, mark
from kit.units import human_seconds, to_gib

if TYPE_CHECKING:
    from kit.emit.run_directory import RunDirectory


@dataclass
class Measured:
    """Measurements of the steps of this process."""

    loss: float | None = None
    """Loss of the last step, nats per token."""
    validation: Mapping[str | None, float] = field(default_factory=dict)
    """Name of a held-out set → its loss, nats per token; None is the name of ``run.data.validation``."""
    memory: tuple[float, str] | None = None
    """Result of ``memory_held_gib``."""
    step_times_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Content of ``summary.json``. ``measured_*`` are null if the process made no step."""

    engine: str
    device: str
    """Name of the main rank's GPU or CPU."""
    world_size: int
    step: int
    samples_seen: int
    tokens_seen: int
    loss: float | None
    """Loss of the last step, nats per token."""
    validation_loss: float | None
    """Validation loss at the end, nats per token; null without validation data."""
    predicted_peak_gib: float
    measured_memory_gib: float | None
    """Memory of the rank with the most."""
    measured_memory_is: str
    """``peak allocated`` on a GPU. On a CPU ``weights, gradients and optimizer``, without activations."""
    predicted_step_time_s: float
    measured_step_time_s: float | None
    """Median over the steps, without the first if there are others."""
    checkpoint: str | None
    """Directory of the last step's checkpoint, relative to the run directory; null if it could not be written."""
    predicted_checkpoint_gib: float | None = None
    measured_checkpoint_gib: float | None = None
    """Size of all files of the last checkpoint."""
    predicted_checkpoint_s: float | None = None
    measured_checkpoint_s: float | None = None
    """Median time that training waited for a checkpoint. Shorter than the write if checkpoints are
    asynchronous."""
    predicted_storage_gib: float | None = None
    measured_storage_gib: float | None = None
    """Size of all checkpoints in the run directory."""
    predicted_storage_usd_per_month: float | None = None
    measured_storage_usd_per_month: float | None = None
    """Cost of these checkpoints in object storage, at list price."""
    validation_losses: dict[str, float] | None = None
    """Validation loss at the end of each set of run.data.validation_sets."""
    stopped: str | None = None
    """Why the run ended before its last step; null if it did not."""
    unsaved: str | None = None
    """Data of this run that is not on disk, in words; null if all is."""

    def beside_prediction(self) -> str:
        """One line for the terminal; ``kit plan --calibrate summary.json`` learns from it."""
        rows = (
            ("step", self.predicted_step_time_s, self.measured_step_time_s, human_seconds),
            (self.measured_memory_is, self.predicted_peak_gib, self.measured_memory_gib, _gib),
            ("checkpoint", self.predicted_checkpoint_gib, self.measured_checkpoint_gib, _gib),
            ("checkpoint stall", self.predicted_checkpoint_s, self.measured_checkpoint_s, human_seconds),
            ("checkpoints kept", self.predicted_storage_gib, self.measured_storage_gib, _gib),
            ("a month of them", self.predicted_storage_usd_per_month, self.measured_storage_usd_per_month, _usd),
        )
        told = [
            f"{name} {words(measured)}" + (f" (predicted {words(predicted)})" if predicted is not None else "")
            for name, predicted, measured, words in rows
            if measured is not None
        ]
        return "measured: " + ", ".join(told)


def finalize(
    engine: Engine,
    rundir: RunDirectory,
    counters: Counters,
    measured: Measured,
    checkpoints: CheckpointManager,
    logger: RunLogger,
    stopped: Reason,
) -> Summary:
    """Collective. Write the summary, and for a stopped run the file ``stopped``.

    Raises CheckpointError on every rank if one of them cannot be written."""
    plan, times_s, kept = rundir.plan, measured.step_times_s, checkpoints.kept
    memory = memory_held_gib(engine, plan) if measured.memory is None and times_s else measured.memory
    operation, size, root = plan.predicted.operation, kept.bytes_of(counters.step), kept.root
    expected = storage.predicted_bytes(plan, counters.step, rundir.run.checkpoint)
    found = on_all_ranks(engine.is_main, lambda: storage.found_bytes(root), f"measuring {root}")[0]
    unsaved = [text for text in (logger.unsaved(counters.step),) if text]
    if times_s and gather(size)[0] is None:
        unsaved.append(f"step {counters.step} has no checkpoint of its own: it could not be written, as was said above")
    summary = Summary(
        engine=plan.layout.engine,
        device=_device_name(plan),
        world_size=plan.layout.world_size,
        step=counters.step,
        samples_seen=counters.samples_seen,
        tokens_seen=counters.tokens_seen,
        loss=measured.loss,
        validation_loss=measured.validation.get(None),
        validation_losses=named(measured.validation),
        predicted_peak_gib=plan.predicted.peak_gib,
        measured_memory_gib=memory[0] if memory else None,
        measured_memory_is=memory[1] if memory else "nothing",
        predicted_step_time_s=plan.predicted.step_time_s,
        # The first step is slow (warm-up), so it counts only if there is no other.
        measured_step_time_s=statistics.median(times_s[1:] or times_s) if times_s else None,
        predicted_checkpoint_gib=to_gib(1e9 * operation.checkpoint_gb),
        measured_checkpoint_gib=None if size is None else to_gib(size),
        predicted_checkpoint_s=operation.checkpoint_s,
        measured_checkpoint_s=statistics.median(checkpoints.stalls_s) if checkpoints.stalls_s else None,
        predicted_storage_gib=to_gib(expected),
        measured_storage_gib=to_gib(found),
        predicted_storage_usd_per_month=storage.usd_per_month(expected),
        measured_storage_usd_per_month=storage.usd_per_month(found),
        stopped=stopped.words if stopped else None,
        unsaved="; ".join(unsaved) or None,
        checkpoint=None if size is None else str(kept.directory(counters.step).relative_to(rundir.path)),
    )
    path = rundir.path / "summary.json"
    on_all_ranks(engine.is_main, lambda: write_json(path, dataclasses.asdict(summary)), f"writing {path}")
    if stopped:
        on_all_ranks(engine.is_main, lambda: mark(rundir.path, stopped), f"marking {rundir.path} as stopped")
    if times_s:
        logger.log(summary.beside_prediction())
    return summary


def named(losses: Mapping[str | None, float]) -> dict[str, float] | None:
    """The losses of run.data.validation_sets; None without any."""
    return {name: loss for name, loss in losses.items() if name is not None} or None


def peak_gib(plan: Plan) -> float:
    """Peak allocated memory of this rank's GPU so far, GiB; 0 without a GPU. Does not wait for the device."""
    return to_gib(torch.cuda.max_memory_allocated()) if plan.cluster.gpu.device == "cuda" else 0.0


def memory_held_gib(engine: Engine, plan: Plan) -> tuple[float, str]:
    """Collective. (GiB of the rank with the most memory, ``Summary.measured_memory_is``)."""
    on_gpu = plan.cluster.gpu.device == "cuda"
    local = peak_gib(plan) if on_gpu else to_gib(sum(engine.memory_bytes().values()))
    return max(gather(local)), "peak allocated" if on_gpu else "weights, gradients and optimizer"


def _device_name(plan: Plan) -> str:
    if plan.cluster.gpu.device == "cuda":
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def _gib(value: float) -> str:
    return f"{value:.3g} GiB"


def _usd(value: float) -> str:
    return f"${value:,.2f}" if value >= 0.01 else f"${value:.2g}"
