"""The end of a run: exchange checkpoint, summary, and what was predicted beside what was measured."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from kit.training.checkpoint import storage
from kit.training.checkpoint.collective import together
from kit.training.checkpoint.exchange import ExchangeCheckpoint, is_exchange
from kit.training.checkpoint.transfer import Counters, export_exchange
from kit.training.stopping import mark
from kit.training.summary import Summary, device_name, memory_held_gib
from kit.units import to_gib

if TYPE_CHECKING:
    from kit.training.loop import _Run


def finish(run: _Run, counters: Counters, export: bool) -> Summary:
    """Collective. Exchange checkpoint where one is wanted, summary, and the mark of a run that was stopped."""
    rundir, engine = run.rundir, run.engine
    plan = rundir.plan
    if run.validated_step != counters.step and not run.stopped:
        run.validate(counters.step)
    exchange = rundir.path / "checkpoints" / f"exchange-step-{counters.step:08d}"
    if export and not _is_exported(exchange, counters):
        export_exchange(engine, exchange, counters, model=plan.model, lora=plan.job.lora)
    if run.memory is None and run.step_times_s:
        run.memory = memory_held_gib(engine)
    operation, size = plan.predicted.operation, run.saving.checkpoints.bytes_of(counters.step)
    stalls = run.saving.stalls_s
    expected = storage.predicted_bytes(plan, counters.step, rundir.run.checkpoint, export)
    root = run.saving.checkpoints.root
    found = together(engine.is_main, lambda: storage.found_bytes(root), f"measuring {root}")[0]
    summary = Summary(
        engine=plan.layout.engine,
        device=device_name(plan),
        world_size=plan.layout.world_size,
        step=counters.step,
        samples_seen=counters.samples_seen,
        tokens_seen=counters.tokens_seen,
        loss=run.loss,
        validation_loss=run.validation_loss,
        predicted_peak_gib=plan.predicted.peak_gib,
        measured_memory_gib=run.memory[0] if run.memory else None,
        measured_memory_is=run.memory[1] if run.memory else "nothing",
        predicted_step_time_s=plan.predicted.step_time_s,
        measured_step_time_s=_typical(run.step_times_s),
        predicted_checkpoint_gib=None if operation is None else to_gib(1e9 * operation.checkpoint_gb),
        measured_checkpoint_gib=None if size is None else to_gib(size),
        predicted_checkpoint_s=None if operation is None else operation.checkpoint_s,
        measured_checkpoint_s=statistics.median(stalls) if stalls else None,
        predicted_storage_gib=None if expected is None else to_gib(expected),
        measured_storage_gib=to_gib(found),
        predicted_storage_usd_per_month=None if expected is None else storage.usd_per_month(expected),
        measured_storage_usd_per_month=storage.usd_per_month(found),
        stopped=run.stopped.words if run.stopped else None,
        exchange_checkpoint=str(exchange.relative_to(rundir.path)) if export else None,
    )
    path = rundir.path / "summary.json"
    together(engine.is_main, lambda: summary.write(path), f"writing {path}")
    if run.stopped:
        together(engine.is_main, lambda: mark(rundir.path, run.stopped), f"marking {rundir.path} as stopped")
    if run.step_times_s:
        run.teller.say(summary.beside_prediction())
    return summary


def _typical(times_s: list[float]) -> float | None:
    """Median; the first step, which warms up, counts only where there is no other."""
    return statistics.median(times_s[1:] or times_s) if times_s else None


def _is_exported(exchange: Path, counters: Counters) -> bool:
    """Whether a finished run is finished once more."""
    return is_exchange(exchange) and ExchangeCheckpoint(exchange).counters == counters
