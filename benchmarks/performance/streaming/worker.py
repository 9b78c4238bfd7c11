"""What one rank measures: the time and the host memory of weights on their way in and out."""

from __future__ import annotations

import time
from pathlib import Path

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


def streamed(rundir: RunDirectory) -> dict[str, float]:
    """Of building the engine with its weights, and of writing a checkpoint of them and of moments: seconds, and the
    most bytes of this rank; and what it holds between the two."""
    source = HfDirectory(rundir.run.model_path or "")
    return_freed_memory()
    with Peak() as loading:
        started = time.perf_counter()
        engine = build_engine(rundir)
        dist.barrier()
        load_s = time.perf_counter() - started
    for kind in (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
        engine.import_state(kind, source)  # moments that exist, with numbers in them
    with Peak() as saving:
        started = time.perf_counter()
        export(engine, rundir.path.parent / f"step-{rundir.path.name}", rundir.plan, COUNTERS)
        dist.barrier()
        save_s = time.perf_counter() - started
    engine.close()
    found = {"load_s": load_s, "save_s": save_s, "loading": loading.grown, "kept": loading.kept}
    return {**found, "saving": saving.grown}


def converted(source: Path, to: str, out: Path, model: Path | None) -> tuple[float, int]:
    """(seconds, the most host memory that it needed at a time, in bytes). ``model``: for a source without it."""
    return_freed_memory()
    with Peak() as peak:
        started = time.perf_counter()
        convert(source, to, out, dtype="float32", model=None if model is None else str(model))
        seconds = time.perf_counter() - started
    return seconds, peak.grown
