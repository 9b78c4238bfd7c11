"""What one rank measures: the time and the host memory of weights on their way in and out."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import kit.addons.importers.megatron.offline  # noqa: F401 - modules are no part of what is measured
from kit.emit.run_directory import RunDirectory
from kit.engines import build_engine
from kit.engines.huggingface.models import HfDirectory
from kit.engines.protocol import StateKind
from kit.training.checkpoint.convert import convert
from kit.training.counters import Counters
from tests.support.checkpoints import export
from tests.support.peak_memory import Peak, return_freed_memory

COUNTERS = Counters(step=1, samples_seen=1, tokens_seen=1, optimizer_steps=1, samples_skipped=0)


Measured = tuple[Any, float, Peak]
"""What a piece of work returns, its seconds, and this rank's memory meanwhile."""


def measured(work: Callable[[], Any]) -> Measured:
    """Run it, and wait for the other ranks where there are some."""
    return_freed_memory()
    with Peak() as peak:
        started = time.perf_counter()
        result = work()
        if dist.is_initialized():
            dist.barrier()
        seconds = time.perf_counter() - started
    return result, seconds, peak


def streamed(rundir: RunDirectory) -> dict[str, float]:
    """Of building the engine with its weights, and of writing a checkpoint of them and of moments: seconds, and the
    most bytes of this rank; and what it holds between the two."""
    source, step = HfDirectory(rundir.run.model_path or ""), rundir.path.parent / f"step-{rundir.path.name}"
    engine, load_s, loading = measured(lambda: build_engine(rundir))
    for kind in (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
        engine.import_state(kind, source)  # moments that exist, with numbers in them
    _, save_s, saving = measured(lambda: export(engine, step, rundir.plan, COUNTERS))
    engine.close()
    times = {"load_s": load_s, "save_s": save_s}
    return {**times, "loading": loading.grown, "kept": loading.kept, "saving": saving.grown}


def converted(source: Path, to: str, out: Path, model: Path | None) -> tuple[float, int]:
    """(seconds, the most host memory that it needed at a time, in bytes). ``model``: for a source without it."""
    of = None if model is None else str(model)
    _, seconds, peak = measured(lambda: convert(source, to, out, dtype="float32", model=of))
    return seconds, peak.grown
