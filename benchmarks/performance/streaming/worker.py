"""What one rank measures: weights in and out beside a plain copy."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from kit.emit.run_directory import RunDirectory
from kit.engines.huggingface.models import HfDirectory
from kit.engines.protocol import StateKind
from kit.training.counters import Counters
from tests.support.checkpoints import export
from tests.support.peak_memory import Peak, return_freed_memory

REPEATS = 3
BLOCK = 16 * 2**20
TARGET = 256 * 2**20
COUNTERS = Counters(step=1, samples_seen=1, tokens_seen=1, optimizer_steps=1, samples_skipped=0)


def streamed(rundir: RunDirectory) -> dict[str, Any]:
    """Import and export, each beside a plain copy of the same bytes by the same processes."""
    from kit.engines.megatron.engine import MegatronEngine

    return_freed_memory()
    scratch = rundir.path.parent / "scratch"
    engine = MegatronEngine(rundir)
    source = HfDirectory(rundir.run.model_path or "")
    for kind in (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
        engine.import_state(kind, source)  # moments that exist, with numbers in them
    files = sorted(Path(rundir.run.model_path or "").glob("*.safetensors"))
    found: dict[str, Any] = {}
    found["import"] = side_by_side(
        lambda: engine.import_state(StateKind.MASTER, HfDirectory(rundir.run.model_path or "")),
        lambda: read_plainly(files, everything=rundir.plan.layout.dp > 1),
        lambda: forget(files),
    )
    written = scratch / "step"

    def write() -> None:
        export(engine, written, rundir.plan, COUNTERS)

    def clean() -> None:
        dist.barrier()
        if engine.is_main:
            shutil.rmtree(written, ignore_errors=True)
            shutil.rmtree(scratch / "plain", ignore_errors=True)
            (scratch / "plain").mkdir(parents=True)
        dist.barrier()

    found["export"] = side_by_side(write, lambda: write_plainly(files, scratch / "plain", copies=3), clean)
    engine.close()
    return found


def side_by_side(work: Callable[[], None], plain: Callable[[], None], before: Callable[[], None]) -> dict[str, float]:
    """Median seconds of each, taken in turn, and the most host memory that the work needed on this rank."""
    times: dict[str, list[float]] = {"work_s": [], "plain_s": []}
    grown = 0
    for _ in range(REPEATS):
        for name, what in (("work_s", work), ("plain_s", plain)):
            before()
            dist.barrier()
            with Peak() as peak:
                started = time.perf_counter()
                what()
                dist.barrier()
                times[name].append(time.perf_counter() - started)
            if name == "work_s":
                grown = max(grown, peak.grown)
    return {name: statistics.median(each) for name, each in times.items()} | {"grown": grown}


def forget(files: list[Path]) -> None:
    """Have the kernel drop its copy of the files, so that both sides read from the disk."""
    if dist.get_rank() == 0:
        for path in files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(files: list[Path], everything: bool) -> None:
    """The bytes that this rank needs, into memory that is there already and no cache holds."""
    memory = memoryview(bytearray(TARGET))
    for path in files:
        start, end = (0, path.stat().st_size) if everything else _share(path)
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while start < end:
                at = start % (TARGET - BLOCK)
                start += file.readinto(memory[at : at + min(BLOCK, end - start)]) or 0


def write_plainly(files: list[Path], directory: Path, copies: int) -> None:
    """Writes this rank's share of the bytes and syncs it to disk, once per kind of state in an exchange checkpoint."""
    for number in range(copies):
        for path in files:
            start, end = _share(path)
            with path.open("rb") as file, (directory / f"{number}-{dist.get_rank()}-{path.name}").open("wb") as out:
                file.seek(start)
                while start < end:
                    out.write(block := file.read(min(BLOCK, end - start)))
                    start += len(block)
                out.flush()
                os.fsync(out.fileno())


def _share(path: Path) -> tuple[int, int]:
    size, rank, world = path.stat().st_size, dist.get_rank(), dist.get_world_size()
    return size * rank // world, size * (rank + 1) // world
