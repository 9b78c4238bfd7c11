"""The one training loop, for every engine.

    data → forward_backward → anomalies? → (gradients to disk) → apply(learning rate) → log → validation → checkpoint

All state is in the engine and in ``Counters``. Learning rate, batch size and data order follow from the counters, so a
run that is killed and resumed makes the same steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kit.engines.collective import StatusAllReduce, rank
from kit.engines.protocol import Engine, LossSum, MicroBatch, Norms, StateKind
from kit.planner.length import length
from kit.planner.schedule import batch_size, learning_rate
from kit.training import determinism
from kit.training.anomalies.handler import AnomalyHandler
from kit.training.anomalies.spikes import APPLIES_STEP, StepDecision
from kit.training.checkpoint.manager import CheckpointManager
from kit.training.checkpoint.store import export_tensors
from kit.training.checkpoint.uploads import Uploads
from kit.training.counters import Counters, run_length
from kit.training.data.loader import DataLoader, Prefetcher, counted, should_prefetch
from kit.training.finalize import Measured, Summary, finalize, memory_held_gib, named, peak_gib
from kit.training.gradient_norms import gradient_norms
from kit.training.logging.metrics import StepMetrics, model_flops_utilisation
from kit.training.logging.run_logger import RunLogger
from kit.training.profile import Profiler
from kit.training.start_point import resume_from
from kit.training.step_timing import StepClock
from kit.training.stopping import Reason, Stopping, Watchdog, mark, watchdog
from kit.training.stragglers import Slowest, Stragglers

if TYPE_CHECKING:
    from kit.emit.run_directory import RunDirectory

_PATIENCE = 10.0
"""Checkpoints and validation count as hung after this many times ``hang_seconds``."""
_FIRST_PATIENCE = 5.0
"""The first step counts as hung after this many times ``hang_seconds``. It compiles kernels and creates
communicators."""


def train(
    engine: Engine,
    rundir: RunDirectory,
    *,
    resume: str | Path | None = None,
    stop_at_step: int | None = None,
    started: float | None = None,
    profile: tuple[int, int] | None = None,
) -> Summary:
    """Collective. Train to the end of the run, or to ``stop_at_step``; write metrics, checkpoints and the summary.

    ``resume``: None, ``"auto"`` or the path of a checkpoint (see ``resume_from``). ``started``: ``time.monotonic()``
    when the process began. ``profile``: first and last step of a trace.

    After the last step the loop writes a checkpoint. If one cannot be written, the loop reports it and trains on. A
    signal or the time limit ends the run after the current step, with a checkpoint; ``Summary.stopped`` names the
    reason.

    Raises DataError, CheckpointError, SpecError, and EngineError, which names the step if loss or gradient is not
    finite.
    """
    if rundir.run.steps is None:
        rundir = counted(rundir)[0]
    with ExitStack() as stack:
        limits = rundir.run.limits
        stopping = stack.enter_context(Stopping(limits.max_minutes, started))
        stack.enter_context(determinism.chosen(rundir.run.deterministic))
        dog = stack.enter_context(watchdog(limits.hang_seconds, rundir.path / "stacks", rank()))
        prefetch = should_prefetch(rundir.plan.cluster.gpu.device)
        ahead = Prefetcher(DataLoader.open(rundir.plan, rundir.run, engine), wanted=prefetch, pinned=prefetch)
        stack.callback(ahead.close)
        checkpoints = CheckpointManager.open(rundir, run_length(rundir.plan, rundir.run))
        dog.beat("resuming", _PATIENCE)
        counters = resume_from(engine, checkpoints.kept, rundir.path / "metrics.jsonl", resume)
        ahead.loader.resume(counters)
        if engine.is_main:
            mark(rundir.path, None)
            if counters.step:
                print(f"resumed after step {counters.step}")
            if rundir.run.data.stream is not None and counters.position and counters.stream is None:
                print(f"no bookmarks in the checkpoint: reading {counters.position:,} samples of the stream")
        uploads = stack.enter_context(Uploads(checkpoints.kept.root, rundir.run.checkpoint))
        checkpoints.finished = uploads.add
        profiler = Profiler(profile, rundir.path)
        run = _Run(engine, rundir, ahead, checkpoints, uploads, dog, stopping, counters, profiler)
        stack.callback(run.logger.close)
        last_step = min(run.total_steps, stop_at_step or run.total_steps)
        while counters.step < last_step and not run.stopped:
            counters = run.step(counters, last_step)
        if run.validated_step != counters.step and not run.stopped:
            run.validate(counters.step)
        dog.beat("finishing", _PATIENCE)
        summary = finalize(
            engine, rundir, ahead.loader.place(counters), run.measured, checkpoints, run.logger, run.stopped
        )
        dog.beat("waiting for uploads", math.inf)
        uploads.finish(run.logger)
        return summary


class _Run:
    """The objects that all steps of a run use."""

    def __init__(
        self,
        engine: Engine,
        rundir: RunDirectory,
        ahead: Prefetcher,
        checkpoints: CheckpointManager,
        uploads: Uploads,
        watchdog: Watchdog,
        stopping: Stopping,
        counters: Counters,
        profiler: Profiler,
    ) -> None:
        """Collective. ``counters``: the position from which the run continues."""
        self.engine, self.rundir, self.checkpoints, self.ahead = engine, rundir, checkpoints, ahead
        self.uploads, self.watchdog, self.stopping, self.profiler = uploads, watchdog, stopping, profiler
        plan, run = rundir.plan, rundir.run
        self.total_steps, self.total_samples = length(plan, run)
        self.logger = RunLogger(rundir.path, plan, run.logging, self.total_steps, counters.step, engine.is_main)
        beat = watchdog.beat
        self.anomalies = AnomalyHandler(engine, run.stability, checkpoints, self.logger, beat, counters.step)
        self.status = StatusAllReduce()
        self.clock = StepClock()
        self.stragglers = Stragglers(engine, plan, self.logger)
        self.stopped = Reason.NONE
        self.measured = Measured()
        self.validated_step: int | None = None
        if counters.step:
            self.logger.log_event("resumed", counters.step, position=counters.position)

    def step(self, counters: Counters, last_step: int) -> Counters:
        """Take one optimizer step; log, validate and save a checkpoint if due. Returns the counters for the next
        step."""
        step = counters.step + 1
        self.clock.turn()
        self.watchdog.beat(f"step {step}", 1.0 if self.measured.step_times_s else _FIRST_PATIENCE)
        self.profiler.begin(step)
        result = self.train_step(counters, another=step < last_step)
        self.profiler.end(step, self.logger.log)
        if result.decision:
            rewound = self.anomalies.handle(result.decision, counters, result.counters, result.batch)
            if rewound is not None:
                self._agree(rewound)
                return rewound
        return self.log_step(result, last_step)

    def train_step(self, before: Counters, another: bool) -> _StepResult:
        """Read the batch, compute gradients, and take the optimizer step unless loss or gradients are anomalous.

        ``another``: a step follows, so read its batch ahead."""
        plan, run, engine, clock = self.rundir.plan, self.rundir.run, self.engine, self.clock
        ramp, full = run.schedule.batch_ramp, plan.layout.global_batch_size
        size = batch_size(before.samples_seen, ramp, full)
        with clock.part("data"), self.profiler.span("data"):
            batch = self.ahead.step(before.position, size)
            if another:
                self.ahead.expect(before.position + size, batch_size(before.samples_seen + size, ramp, full))
        timed = self.stragglers.timed(before.step + 1)
        with clock.part("forward_backward"), self.profiler.span("forward_backward"), timed:
            loss = engine.forward_backward(batch)
        self.stragglers.sample(clock.parts_s["data"], batch)
        sums: list[float] = [
            sum(each.padding for each in batch),
            sum(each.positions for each in batch),
            sum(each.attended for each in batch),
        ]
        sums += [value for number in range(len(run.data.blend)) for value in engine.set_sums.get(number, (0, 0))]
        maxima = (self.stopping.mine(), clock.parts_s["data"], peak_gib(plan))
        self.status.start(maxima, sums)
        with clock.part("optimizer"), self.profiler.span("optimizer"):
            decision = self.anomalies.judge(loss.mean)
        if self.measured.memory is None and plan.cluster.gpu.device == "cpu":
            self.measured.memory = memory_held_gib(engine, plan)  # gradients exist now; CUDA records its peak itself
        if before.step + 1 in run.logging.gradients_at_steps:
            path = self.rundir.path / "gradients" / f"step-{before.step + 1:06d}.safetensors"
            export_tensors(engine, StateKind.GRADIENT, path)
        seen = before.samples_seen + size
        rate = learning_rate(
            seen,
            peak=plan.job.learning_rate,
            schedule=run.schedule,
            total_steps=self.total_steps,
            global_batch_size=full,
            total_samples=self.total_samples,
        )
        norms: Norms | None = None
        by_group = gradient_norms(engine) if _is_due(before.step + 1, run.logging.gradient_norms_every_steps) else None
        if decision.action in APPLIES_STEP:
            with clock.part("optimizer"), self.profiler.span("optimizer"):
                norms = engine.apply(rate)
        stepped = norms is not None and not norms.skipped
        after = dataclasses.replace(
            before,
            step=before.step + 1,
            samples_seen=seen,
            tokens_seen=before.tokens_seen + size,  # at least; log_step counts them
            optimizer_steps=before.optimizer_steps + stepped,
        )
        grad_norm = norms.gradient if norms and stepped else None
        return _StepResult(after, size, batch, loss, rate, decision, norms, grad_norm, by_group)

    def log_step(self, result: _StepResult, last_step: int) -> Counters:
        """Collective. Log the step; validate and save a checkpoint if due. Returns the counters for the next step."""
        run, step = self.rundir.run, result.counters.step
        if result.grad_norm is not None:
            self.anomalies.detector.record(result.loss.mean, result.grad_norm)
        self.measured.loss = result.loss.mean
        self.measured.step_times_s.append(self.clock.step_s)
        is_end = step == self.total_steps  # not ``last_step``: an early stop must not change the metrics
        validated = self.validate(step) if is_end or _is_due(step, run.validation_every_steps) else {}
        agreed = self._agree(result.counters)
        seen = result.counters.tokens_seen - result.size + agreed.tokens
        counters = dataclasses.replace(result.counters, tokens_seen=seen)
        routing = self.engine.routing_metrics()
        self.uploads.report(self.logger)
        slowest = self.stragglers.judge(step, self.clock.step_s)
        is_last = step == last_step or bool(self.stopped)
        if self.engine.is_main:
            due = is_last or _is_due(step, run.logging.every_steps)
            self.logger.log_step(self._metrics(result, agreed, validated, routing, slowest), due)
        if is_last or _is_due(step, run.checkpoint.every_steps):
            self._save(counters, wait=is_last)
        return counters

    def validate(self, step: int) -> dict[str | None, float]:
        """Collective. Loss on each set of validation data, nats per token; None is the name of run.data.validation."""
        self.validated_step = step
        self.watchdog.beat(f"validation after step {step}", _PATIENCE)
        with self.clock.part("validation"):
            batches = self.ahead.loader.validation_batches()
            losses = {name: self.engine.evaluate(of_set).mean for name, of_set in batches.items()}
        self.measured.validation = losses
        return losses

    def _save(self, counters: Counters, wait: bool) -> None:
        """Collective. Write a checkpoint. Reports a failure and continues."""
        self.watchdog.beat(f"checkpoint of step {counters.step}", _PATIENCE)
        with self.clock.part("checkpoint"):
            failure = self.checkpoints.save(self.engine, self.ahead.loader.place(counters), wait)
        self.logger.log_checkpoint(counters.step, self.checkpoints.stalls_s[-1])
        if failure is not None:
            self.logger.log(f"no checkpoint at step {counters.step}, the run goes on: {failure}")
            self.logger.log_event("checkpoint failed", counters.step, why=failure)

    def _agree(self, counters: Counters) -> _Agreed:
        """Collective."""
        (reason, data_s, memory), (padding, positions, attended, *by_set) = self.status.result()
        pairs = zip(self.rundir.run.data.blend, by_set[::2], by_set[1::2], strict=True)
        losses = {name: loss / labels for name, loss, labels in pairs if labels}
        # Every rank counted its batch, and ranks of one data-parallel rank have the same batch.
        copies = self.rundir.plan.layout.world_size // self.engine.dp_size
        tokens = round(positions - padding) // copies
        agreed = _Agreed(data_s, memory, tokens, padding / positions, attended / (positions - padding), losses or None)
        self.stopped = Reason(int(reason))
        if self.stopped:
            self.logger.log_event("stopped", counters.step, why=self.stopped.words)
            self.logger.log(f"{self.stopped.words}: stopping after step {counters.step} with a checkpoint")
        return agreed

    def _metrics(
        self,
        result: _StepResult,
        agreed: _Agreed,
        validated: Mapping[str | None, float],
        routing: Mapping[str, float | None],
        slowest: Slowest | None,
    ) -> StepMetrics:
        plan, clock, pace, step_s = self.rundir.plan, self.clock, self.clock.pace_s, self.clock.step_s
        tokens_per_s = agreed.tokens / step_s
        on_gpu = plan.cluster.gpu.device != "cpu"
        return StepMetrics(
            step=result.counters.step,
            loss=result.loss.mean,
            grad_norm=result.grad_norm,
            learning_rate=result.rate,
            tokens=result.loss.tokens,
            samples_seen=result.counters.samples_seen,
            set_losses=agreed.set_losses,
            validation_loss=validated.get(None),
            validation_losses=named(validated),
            step_time_s=step_s,
            tokens_per_s=tokens_per_s,
            # Not on CPUs: their peak in the catalog is a round figure, not from a data sheet.
            mfu=model_flops_utilisation(plan, tokens_per_s, agreed.row_tokens) if on_gpu else None,
            batch_size=result.size,
            tokens_per_s_per_gpu=tokens_per_s / plan.layout.world_size,
            padding_fraction=agreed.padding_fraction,
            data_s=agreed.data_s,
            forward_backward_s=clock.parts_s["forward_backward"],
            optimizer_s=clock.parts_s.get("optimizer", 0.0),
            loop_s=clock.gap_s,
            memory_gib=agreed.memory_gib if on_gpu else None,
            slowest_rank=slowest.rank if slowest else None,
            slowest_rank_ratio=slowest.ratio if slowest else None,
            grad_norms=result.grad_norms,
            loss_scale=result.norms.loss_scale if result.norms else None,
            event=f"{result.decision.kind}: {result.decision.action}" if result.decision else None,
            remote_step=self.uploads.newest_step,
            eta_s=None if pace is None else pace * (self.total_steps - result.counters.step),
            **routing,  # type: ignore[arg-type]
        )


class _Agreed(NamedTuple):
    """Values over all ranks."""

    data_s: float
    """Longest wait for data."""
    memory_gib: float
    """Peak of the GPU with the most."""
    tokens: int
    """Tokens of the step, without padding."""
    padding_fraction: float
    row_tokens: float
    """Tokens of the row of a token, mean over the tokens."""
    set_losses: dict[str, float] | None
    """Loss of each set of a blend."""


class _StepResult(NamedTuple):
    """Result of a step, also if the optimizer did not take it."""

    counters: Counters
    """Counters after the step."""
    size: int
    """Number of sequences of the step, over all ranks."""
    batch: Sequence[MicroBatch]
    loss: LossSum
    rate: float
    decision: StepDecision
    norms: Norms | None
    """Norms of the optimizer step; None if there was none."""
    grad_norm: float | None
    """Gradient norm; None if no weight has changed."""
    grad_norms: dict[str, float] | None
    """Gradient norm of each group of parameters, where it was asked for."""


def _is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0
