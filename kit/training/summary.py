"""What a run came to, beside what was predicted of it: ``summary.json``."""

from __future__ import annotations

import dataclasses
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from kit.engines.base import Engine
from kit.planner.plan import Plan
from kit.training.checkpoint.collective import gather
from kit.training.checkpoint.files import write_json
from kit.units import human_seconds, to_gib


@dataclass(frozen=True, kw_only=True)
class Summary:
    """``measured_*`` are null where no step was made."""

    engine: str
    device: str
    """GPU or processor that the main rank ran on."""
    world_size: int
    step: int
    samples_seen: int
    tokens_seen: int
    loss: float | None
    """Of the last step, nats per token."""
    validation_loss: float | None
    """At the end; null without held-out data."""
    predicted_peak_gib: float
    measured_memory_gib: float | None
    """Of the fullest rank."""
    measured_memory_is: str
    """``peak allocated``, or on a CPU ``weights, gradients and optimizer``, which leaves out activations."""
    predicted_step_time_s: float
    measured_step_time_s: float | None
    """Median, without the first step where there are more."""
    exchange_checkpoint: str | None
    """Directory, relative to the run directory."""
    predicted_checkpoint_gib: float | None = None
    measured_checkpoint_gib: float | None = None
    """Of the last native checkpoint, all files."""
    predicted_checkpoint_s: float | None = None
    measured_checkpoint_s: float | None = None
    """Median time that training stood still for one; with asynchronous ones less than writing took."""
    predicted_storage_gib: float | None = None
    measured_storage_gib: float | None = None
    """Of all checkpoints that lie in the run directory: as many as the settings keep, and the exchange checkpoint."""
    predicted_storage_usd_per_month: float | None = None
    measured_storage_usd_per_month: float | None = None
    """To keep them in object storage, at list price."""
    stopped: str | None = None
    """Why the run ended before it was done."""

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

    def write(self, path: Path) -> None:
        """Replace ``path``. Raises OSError."""
        write_json(path, dataclasses.asdict(self))


def peak_gib(plan: Plan) -> float:
    """Of this rank's GPU so far; 0 without one. Asks the allocator on the host, and waits for nothing."""
    return to_gib(torch.cuda.max_memory_allocated()) if plan.cluster.gpu.device == "cuda" else 0.0


def _gib(value: float) -> str:
    return f"{value:.3g} GiB"


def _usd(value: float) -> str:
    return f"${value:,.2f}" if value >= 0.01 else f"${value:.2g}"


def memory_held_gib(engine: Engine) -> tuple[float, str]:
    """Collective. Memory of the fullest rank and what was counted."""
    held = engine.held_bytes()
    peak = held.get("peak_allocated")
    local = sum(held.values()) if peak is None else peak
    return to_gib(max(gather(local))), "weights, gradients and optimizer" if peak is None else "peak allocated"


def device_name(plan: Plan) -> str:
    """What this rank computes on."""
    if plan.cluster.gpu.device == "cuda":
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()
