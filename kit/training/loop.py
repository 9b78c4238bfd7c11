"""The one training loop, for every engine.

    data → forward_backward → (gradients to disk) → apply(learning rate) → metrics → validation → checkpoint

All state is in the engine and in ``Counters``; learning rate and data order follow from the counters, so a run
that is killed and resumed makes the same steps.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kit.engines.base import Engine, StateKind
from kit.errors import CheckpointError, EngineError
from kit.planner.plan import Plan
from kit.specs.run import RunSpec
from kit.training.checkpoint.agreement import together
from kit.training.checkpoint.background import Background
from kit.training.checkpoint.hub import Counters, HubCheckpoint, export_hub, export_tensors
from kit.training.checkpoint.native import NativeCheckpoints
from kit.training.data.feed import Feed
from kit.training.metrics import MetricsLog, StepMetrics
from kit.training.resume import resume_from
from kit.training.schedule import learning_rate
from kit.training.summary import Summary, device_name, memory_held_gib

if TYPE_CHECKING:
    from kit.emit.run_directory import RunDirectory


def total_steps(plan: Plan, run: RunSpec) -> int:
    """Optimizer steps of the whole run: ``run.steps``, or as many as the token budget makes, at least one."""
    return run.steps or max(1, plan.job.total_tokens // (plan.layout.global_batch_size * plan.job.seq_length))


def train(
    engine: Engine,
    rundir: RunDirectory,
    *,
    resume: str | Path | None = None,
    stop_at_step: int | None = None,
    export_hub_at_end: bool = True,
) -> Summary:
    """Collective. Train to the end of the run, or to ``stop_at_step``, and write what the run directory promises.

    ``resume``: None, ``"auto"`` or the path of a checkpoint (see ``resume_from``). The last step always has a native
    checkpoint, and with ``export_hub_at_end`` a hub checkpoint ``checkpoints/hub-step-NNNNNNNN``. A native
    checkpoint that cannot be written is reported and the run goes on with the previous one.

    Raises DataError, CheckpointError, and EngineError naming the step where loss or gradient is not finite.
    """
    run = _Run(engine, rundir)
    feed = Feed.open(rundir.plan, rundir.run, engine)
    counters = resume_from(engine, run.checkpoints, run.metrics_path, resume)
    if counters.step and engine.is_main:
        print(f"resumed after step {counters.step}", flush=True)
    last_step = min(run.total_steps, stop_at_step or run.total_steps)
    log = MetricsLog(run.metrics_path, counters.step) if engine.is_main else None
    try:
        while counters.step < last_step:
            counters = run.step(feed, counters, log, is_last=counters.step + 1 == last_step)
    finally:
        if log is not None:
            log.close()
    return run.finish(feed, counters, export_hub_at_end)


@dataclass
class _Run:
    """What the steps of a run share."""

    engine: Engine
    rundir: RunDirectory
    loss: float | None = None
    validation_loss: float | None = None
    validated_step: int | None = None
    memory: tuple[float, str] | None = None
    step_times_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.rundir.plan
        self.total_steps = total_steps(plan, self.rundir.run)
        self.metrics_path = self.rundir.path / "metrics.jsonl"
        self.checkpoints = NativeCheckpoints(
            root=self.rundir.path / "checkpoints",
            plan_hash=plan.digest,
            world_size=plan.layout.world_size,
            keep_last=self.rundir.run.checkpoint.keep_last,
            model=f"{plan.layout.engine} {plan.model_digest}",
        )
        self.background = Background(self.checkpoints) if self.rundir.run.checkpoint.asynchronous else None

    def step(self, feed: Feed, counters: Counters, log: MetricsLog | None, is_last: bool) -> Counters:
        """One optimizer step and what is due after it; returns the counters after it."""
        plan, run, engine = self.rundir.plan, self.rundir.run, self.engine
        step, batch_size = counters.step + 1, plan.layout.global_batch_size
        started = time.perf_counter()
        result = engine.forward_backward(feed.step(counters.samples_seen))
        _require_finite("loss", result.mean, step)
        if self.memory is None and plan.cluster.gpu.device == "cpu":
            self.memory = memory_held_gib(engine)  # while the gradients exist; CUDA remembers its peak
        if step in run.logging.gradients_at_steps:
            export_tensors(engine, StateKind.GRADIENT, self.rundir.path / "gradients" / f"step-{step:06d}.safetensors")
        counters = Counters(
            step=step,
            samples_seen=counters.samples_seen + batch_size,
            tokens_seen=counters.tokens_seen + batch_size * plan.job.seq_length,
            optimizer_steps=engine.optimizer_steps + 1,
        )
        rate = learning_rate(
            counters.samples_seen,
            peak=plan.job.learning_rate,
            schedule=run.schedule,
            total_steps=self.total_steps,
            global_batch_size=batch_size,
        )
        norms = engine.apply(rate)
        if norms.skipped:
            counters = dataclasses.replace(counters, optimizer_steps=engine.optimizer_steps)
        else:
            _require_finite("gradient norm", norms.gradient, step)
        step_time_s = time.perf_counter() - started
        self.step_times_s.append(step_time_s)
        self.loss = result.mean
        is_end = step == self.total_steps  # where a run is merely stopped must not show in its metrics
        validated = self._validate(feed, step) if _is_due(step, run.validation_every_steps) or is_end else None
        metrics = StepMetrics(
            step=step,
            loss=result.mean,
            grad_norm=None if norms.skipped else norms.gradient,
            learning_rate=rate,
            tokens=result.tokens,
            samples_seen=counters.samples_seen,
            validation_loss=validated,
            step_time_s=step_time_s,
            tokens_per_s=_tokens_per_s(plan, step_time_s),
            mfu=_mfu(plan, step_time_s),
        )
        if log is not None:
            log.write(metrics)
            if _is_due(step, run.logging.every_steps) or is_last:
                print(metrics.line(self.total_steps), flush=True)
        if _is_due(step, run.checkpoint.every_steps) or is_last:
            self._checkpoint(counters, is_last)
        return counters

    def finish(self, feed: Feed, counters: Counters, export_hub_at_end: bool) -> Summary:
        """Hub checkpoint and summary."""
        plan, engine = self.rundir.plan, self.engine
        if self.validated_step != counters.step:
            self._validate(feed, counters.step)
        hub = self.rundir.path / "checkpoints" / f"hub-step-{counters.step:08d}"
        if export_hub_at_end and not _is_exported(hub, counters):
            export_hub(engine, hub, counters, model=plan.model, lora=plan.job.lora)
        if self.memory is None and self.step_times_s:
            self.memory = memory_held_gib(engine)
        summary = Summary(
            engine=plan.layout.engine,
            device=device_name(plan),
            world_size=plan.layout.world_size,
            step=counters.step,
            samples_seen=counters.samples_seen,
            tokens_seen=counters.tokens_seen,
            loss=self.loss,
            validation_loss=self.validation_loss,
            predicted_peak_gib=plan.predicted.peak_gib,
            measured_memory_gib=self.memory[0] if self.memory else None,
            measured_memory_is=self.memory[1] if self.memory else "nothing",
            predicted_step_time_s=plan.predicted.step_time_s,
            measured_step_time_s=_typical(self.step_times_s),
            hub_checkpoint=str(hub.relative_to(self.rundir.path)) if export_hub_at_end else None,
        )
        path = self.rundir.path / "summary.json"
        together(engine.is_main, lambda: summary.write(path), f"writing {path}")
        return summary

    def _validate(self, feed: Feed, step: int) -> float | None:
        self.validated_step = step
        batches = feed.held_out()
        if batches is not None:
            self.validation_loss = self.engine.evaluate(batches).mean
        return self.validation_loss

    def _checkpoint(self, counters: Counters, is_last: bool) -> None:
        try:
            if self.background is None:
                self.checkpoints.save(self.engine, counters)
                return
            self.background.start(self.engine, counters)
            if is_last:
                self.background.wait()
        except CheckpointError as error:
            if self.engine.is_main:
                print(f"no checkpoint at step {counters.step}, the run goes on: {error}", flush=True)


def _is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0


def _typical(times_s: list[float]) -> float | None:
    """Median; the first step, which warms up, counts only where there is no other."""
    return statistics.median(times_s[1:] or times_s) if times_s else None


def _require_finite(what: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise EngineError(
            f"{what} is {value} at step {step}; resume from the last checkpoint with a lower learning_rate or a "
            f"smaller grad_clip, and look at the samples of that step"
        )


def _tokens_per_s(plan: Plan, step_time_s: float) -> float:
    return plan.layout.global_batch_size * plan.job.seq_length / step_time_s


def _mfu(plan: Plan, step_time_s: float) -> float | None:
    """Proportional to tokens/s, so the plan's own pair of both gives it, by the plan's own count of FLOPs."""
    predicted = plan.predicted
    if plan.cluster.gpu.device == "cpu":
        return None  # the catalog's peak of a CPU process is a round figure, not a data sheet's
    return predicted.mfu * _tokens_per_s(plan, step_time_s) / predicted.tokens_per_s


def _is_exported(hub: Path, counters: Counters) -> bool:
    """Whether a finished run is finished once more."""
    return (hub / "hub.json").is_file() and HubCheckpoint(hub).counters == counters
