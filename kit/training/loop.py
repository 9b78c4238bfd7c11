"""The one training loop, for every engine.

    data → forward_backward → judged → (gradients to disk) → apply(learning rate) → told → validation → checkpoint

All state is in the engine and in ``Counters``; learning rate, batch size and data order follow from the counters, so a
run that is killed and resumed makes the same steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kit.engines.base import Engine, LossSum, MicroBatch, Norms, StateKind
from kit.training import determinism
from kit.training.anomalies.handler import Unsteady, history
from kit.training.anomalies.spikes import GOING_ON, Stability, Verdict
from kit.training.checkpoint.manager import Saving
from kit.training.checkpoint.transfer import Counters, export_tensors
from kit.training.data.loader import Feed
from kit.training.data.prefetch import Ahead, worth_it
from kit.training.finalize import finish
from kit.training.logging.events import Events
from kit.training.logging.metrics import StepMetrics
from kit.training.logging.run_logger import Teller
from kit.training.profile import Profiler
from kit.training.rank_sync import Peers
from kit.training.resume import resume_from
from kit.training.schedule import batch_size, learning_rate, length
from kit.training.step_timing import Clock
from kit.training.stopping import Reason, Stopping, mark
from kit.training.summary import Summary, memory_held_gib, peak_gib
from kit.training.watchdog import Watchdog

if TYPE_CHECKING:
    from kit.emit.run_directory import RunDirectory

PATIENCE = 10.0
"""Checkpoints and validation may take so many times as long as a step before they count as hung."""
FIRST_PATIENCE = 5.0
"""So may the first step: kernels are compiled and communicators made."""


def train(
    engine: Engine,
    rundir: RunDirectory,
    *,
    resume: str | Path | None = None,
    stop_at_step: int | None = None,
    export_at_end: bool = True,
    started: float | None = None,
    profile: tuple[int, int] | None = None,
) -> Summary:
    """Collective. Train to the end of the run, or to ``stop_at_step``, and write what the run directory promises.

    ``resume``: None, ``"auto"`` or the path of a checkpoint (see ``resume_from``). The last step always has a native
    checkpoint, and with ``export_at_end`` an exchange checkpoint ``checkpoints/exchange-step-NNNNNNNN``. A native
    checkpoint that cannot be written is reported and the run goes on with the previous one. A signal or the time limit
    end a run after the step that runs, with a native checkpoint and ``Summary.stopped``. ``started``:
    ``time.monotonic()`` when the process began. ``profile``: first and last step of a trace.

    Raises DataError, CheckpointError, SpecError, and EngineError naming the step where loss or gradient is not finite.
    """
    with ExitStack() as around:
        limits = rundir.run.limits
        stopping = around.enter_context(Stopping(limits.max_minutes, started))
        around.enter_context(determinism.chosen(rundir.run.deterministic))
        watchdog = around.enter_context(Watchdog(limits.hang_seconds, rundir.path / "stacks", determinism.rank()))
        run = _Run(engine, rundir, stopping, watchdog, Profiler(profile, rundir.path))
        around.callback(run.feed.close)
        watchdog.beat("resuming", PATIENCE)
        counters = resume_from(engine, run.saving.checkpoints, rundir.path / "metrics.jsonl", resume)
        if engine.is_main:
            mark(rundir.path, None)
            if counters.step:
                print(f"resumed after step {counters.step}", flush=True)
        run.begin(counters)
        around.callback(run.teller.close)
        last_step = min(run.total_steps, stop_at_step or run.total_steps)
        while counters.step < last_step and not run.stopped:
            counters = run.step(counters, last_step)
        watchdog.beat("finishing", PATIENCE)
        return finish(run, counters, export_at_end and not run.stopped)


class _Run:
    """What the steps of a run share."""

    def __init__(
        self, engine: Engine, rundir: RunDirectory, stopping: Stopping, watchdog: Watchdog, profiler: Profiler
    ) -> None:
        self.engine, self.rundir, self.stopping, self.watchdog = engine, rundir, stopping, watchdog
        self.profiler = profiler
        plan, run = rundir.plan, rundir.run
        self.total_steps, self.total_samples = length(plan, run)
        ahead = worth_it(plan.cluster.gpu.device)
        self.feed = Ahead(Feed.open(plan, run, engine), wanted=ahead, pinned=ahead)
        self.saving = Saving(rundir)
        self.stability = Stability(run.stability)
        self.unsteady = Unsteady(self)
        self.events = Events(rundir.path / "events.jsonl", engine.is_main)
        self.peers = Peers()
        self.clock = Clock()
        self.stopped = Reason.NONE
        self.loss: float | None = None
        self.validation_loss: float | None = None
        self.validated_step: int | None = None
        self.memory: tuple[float, str] | None = None
        self.step_times_s: list[float] = []

    def begin(self, counters: Counters) -> None:
        """Collective. Open what steps are told to; remember the steps before the resume."""
        plan, run, path = self.rundir.plan, self.rundir.run, self.rundir.path
        self.teller = Teller(path, plan, run.logging, self.total_steps, counters.step, self.engine.is_main)
        self.stability.forget(history(path / "metrics.jsonl", counters.step, run.stability.window_steps))
        if counters.step:
            self.events.write("resumed", counters.step, position=counters.position)

    def step(self, counters: Counters, last_step: int) -> Counters:
        """One optimizer step and what is due after it; returns the counters to go on from."""
        step = counters.step + 1
        self.clock.turn()
        self.watchdog.beat(f"step {step}", 1.0 if self.step_times_s else FIRST_PATIENCE)
        waited_s = self.clock.before_s.get("data", 0.0)
        self.peers.start([self.stopping.mine(), waited_s, peak_gib(self.rundir.plan)])
        self.profiler.begin(step)
        made = self._make(counters, another=step < last_step)
        self.profiler.end(step, self.teller.say)
        if made.verdict:
            going_on = self.unsteady.decide(made.verdict, counters, made.counters, made.batch)
            if going_on is not None:  # rewound
                self._end_of_step(going_on)
                return going_on
        self._tell(made, last_step)
        return made.counters

    def _make(self, before: Counters, another: bool) -> _Made:
        """Data, gradients, a verdict on them, and the optimizer step where that lets it be; ``another`` follows."""
        plan, run, engine, clock = self.rundir.plan, self.rundir.run, self.engine, self.clock
        size = batch_size(before.samples_seen, run.schedule.batch_ramp, plan.layout.global_batch_size)
        with clock.part("data"), self.profiler.span("data"):
            batch = self.feed.step(before.position, size)
            if another:
                ramp, full = run.schedule.batch_ramp, plan.layout.global_batch_size
                self.feed.expect(before.position + size, batch_size(before.samples_seen + size, ramp, full))
        with clock.part("forward_backward"), self.profiler.span("forward_backward"):
            loss = engine.forward_backward(batch)
        with clock.part("optimizer"), self.profiler.span("optimizer"):
            verdict = self._judge(loss.mean)
        if self.memory is None and plan.cluster.gpu.device == "cpu":
            self.memory = memory_held_gib(engine)  # while the gradients exist; CUDA remembers its peak
        if before.step + 1 in run.logging.gradients_at_steps:
            path = self.rundir.path / "gradients" / f"step-{before.step + 1:06d}.safetensors"
            export_tensors(engine, StateKind.GRADIENT, path)
        seen = before.samples_seen + size
        rate = learning_rate(
            seen,
            peak=plan.job.learning_rate,
            schedule=run.schedule,
            total_steps=self.total_steps,
            global_batch_size=plan.layout.global_batch_size,
            total_samples=self.total_samples,
        )
        norms: Norms | None = None
        if verdict.action in GOING_ON:
            with clock.part("optimizer"), self.profiler.span("optimizer"):
                norms = engine.apply(rate)
        stepped = norms is not None and not norms.skipped
        after = dataclasses.replace(
            before,
            step=before.step + 1,
            samples_seen=seen,
            tokens_seen=before.tokens_seen + size * plan.job.seq_length,
            optimizer_steps=before.optimizer_steps + stepped,
        )
        return _Made(after, size, batch, loss, rate, verdict, norms, norms.gradient if norms and stepped else None)

    def _judge(self, loss: float) -> Verdict:
        """Of loss and gradient norm, before the optimizer step: what must not be applied is not."""
        verdict = self.stability.of_loss(loss)
        if verdict.action not in GOING_ON:
            return verdict
        norm = self.engine.gradient_norm()
        if norm is None:  # fp16's overflows are for its loss scale to mend
            return verdict
        of_norm = self.stability.of_norm(norm)
        return verdict if verdict and of_norm.action in GOING_ON else of_norm

    def _tell(self, made: _Made, last_step: int) -> None:
        """Collective. Remember the step, validate and save where it is due, and say what there is to say."""
        run, step = self.rundir.run, made.counters.step
        if made.grad_norm is not None:
            self.stability.remember(made.loss.mean, made.grad_norm)
        self.loss = made.loss.mean
        self.step_times_s.append(self.clock.step_s)
        is_end = step == self.total_steps  # where a run is merely stopped must not show in its metrics
        validated = self.validate(step) if is_end or _is_due(step, run.validation_every_steps) else None
        agreed = self._end_of_step(made.counters)
        is_last = step == last_step or bool(self.stopped)
        if self.engine.is_main:
            self.teller.step(self._metrics(made, agreed, validated), is_last or _is_due(step, run.logging.every_steps))
        if is_last or _is_due(step, run.checkpoint.every_steps):
            self.save(made.counters, wait=is_last)

    def validate(self, step: int) -> float | None:
        """Collective. Loss on the held-out data; None without any."""
        self.validated_step = step
        self.watchdog.beat(f"validation after step {step}", PATIENCE)
        with self.clock.part("validation"):
            batches = self.feed.held_out()
            if batches is not None:
                self.validation_loss = self.engine.evaluate(batches).mean
        return self.validation_loss

    def save(self, counters: Counters, wait: bool) -> None:
        """Collective. A native checkpoint; one that cannot be written is told of, and the run goes on."""
        self.watchdog.beat(f"checkpoint of step {counters.step}", PATIENCE)
        with self.clock.part("checkpoint"):
            failure = self.saving.save(self.engine, counters, wait)
        if failure is not None:
            self.teller.say(f"no checkpoint at step {counters.step}, the run goes on: {failure}")
            self.events.write("checkpoint failed", counters.step, why=failure)

    def _end_of_step(self, counters: Counters) -> list[float]:
        """What all ranks agreed on: [reason to stop, slowest wait for data, fullest GPU]."""
        agreed = self.peers.largest()
        self.stopped = Reason(int(agreed[0]))
        if self.stopped:
            self.events.write("stopped", counters.step, why=self.stopped.words)
            self.teller.say(f"{self.stopped.words}: stopping after step {counters.step} with a checkpoint")
        return agreed

    def _metrics(self, made: _Made, agreed: Sequence[float], validated: float | None) -> StepMetrics:
        plan, clock, pace = self.rundir.plan, self.clock, self.clock.pace_s
        step_s = clock.step_s
        tokens_per_s = made.size * plan.job.seq_length / step_s
        on_gpu = plan.cluster.gpu.device != "cpu"
        return StepMetrics(
            step=made.counters.step,
            loss=made.loss.mean,
            grad_norm=made.grad_norm,
            learning_rate=made.rate,
            tokens=made.loss.tokens,
            samples_seen=made.counters.samples_seen,
            validation_loss=validated,
            step_time_s=step_s,
            tokens_per_s=tokens_per_s,
            # Proportional to tokens/s, so the plan's own pair of both gives it, by the plan's own count of FLOPs. The
            # catalog's peak of a CPU process is a round figure, not a data sheet's.
            mfu=plan.predicted.mfu * tokens_per_s / plan.predicted.tokens_per_s if on_gpu else None,
            batch_size=made.size,
            tokens_per_s_per_gpu=tokens_per_s / plan.layout.world_size,
            data_s=agreed[1] if "data" in clock.before_s else clock.parts_s["data"],
            forward_backward_s=clock.parts_s["forward_backward"],
            optimizer_s=clock.parts_s.get("optimizer", 0.0),
            loop_s=clock.before_s.get("loop"),
            checkpoint_s=clock.before_s.get("checkpoint"),
            memory_gib=agreed[2] if on_gpu else None,
            loss_scale=made.norms.loss_scale if made.norms else None,
            event=f"{made.verdict.kind}: {made.verdict.action}" if made.verdict else None,
            eta_s=None if pace is None else pace * (self.total_steps - made.counters.step),
        )


class _Made(NamedTuple):
    """A step that was made, or not."""

    counters: Counters
    """After it."""
    size: int
    """Sequences over all ranks."""
    batch: Sequence[MicroBatch]
    loss: LossSum
    rate: float
    verdict: Verdict
    norms: Norms | None
    """Of the optimizer's step; None where it was left out."""
    grad_norm: float | None
    """None where no weight has changed."""


def _is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0
