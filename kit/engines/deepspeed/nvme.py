"""ZeRO-Infinity's swap files: before anything is loaded, whether they can work; afterwards, that they are gone."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from deepspeed.ops.op_builder import AsyncIOBuilder
from torch.utils.cpp_extension import _get_build_directory

from kit.emit.machine import NO_LIBAIO, check_host_memory, check_nvme, swap_directory
from kit.errors import EngineError

if TYPE_CHECKING:
    from kit.emit.run_directory import RunDirectory


STALE_LOCK_S = 1200
"""The longest file of the op compiles in a minute or two; on a crowded machine in a few more."""


def prepare(rundir: RunDirectory, settings: dict[str, Any]) -> None:
    """Check this machine, and tell ``settings`` where the swap files go; a path that stands there already is kept.

    Raises KitError for a disk, memory or library that will not do.
    """
    check_host_memory(rundir.plan)
    folder = swap_directory(rundir.plan, rundir.run, rundir.path)
    if folder is None:
        return
    dist.barrier()  # another engine of these processes may still be removing its files
    check_nvme(rundir.plan, rundir.run, rundir.path)
    load_async_io()
    zero = settings["zero_optimization"]
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, {}).get("device") == "nvme":
            zero[name].setdefault("nvme_path", str(folder))


def remove_swap_files(rundir: RunDirectory) -> None:
    """This rank's swap files, and the folders that are empty then: other ranks may still be writing theirs."""
    folder = swap_directory(rundir.plan, rundir.run, rundir.path)
    if folder is None:
        return
    for own in sorted(folder.glob(f"zero_stage_3/*/rank{dist.get_rank()}")):
        shutil.rmtree(own, ignore_errors=True)
    for parent in [*folder.glob("zero_stage_3/*"), folder / "zero_stage_3", folder]:
        try:
            parent.rmdir()
        except OSError:
            continue  # not empty: another rank's


def load_async_io() -> None:
    """DeepSpeed's binding to libaio, compiled on first use. Raises EngineError that names what is missing."""
    _find_ninja()
    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise EngineError(NO_LIBAIO)
    _refuse_stale_lock(builder.name)
    try:
        builder.load(verbose=False)
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EngineError(
            f"DeepSpeed's async_io op could not be built ({reason}); it needs g++ and ninja, "
            "and a writable TORCH_EXTENSIONS_DIR"
        ) from error


def _refuse_stale_lock(op: str) -> None:
    """A build that was killed leaves a lock file, on which every later one waits for ever (torch, file_baton.py)."""
    folder = Path(_get_build_directory(op, verbose=False))
    lock = folder / "lock"
    newest = max((file.stat().st_mtime for file in folder.iterdir()), default=0.0)
    if lock.exists() and time.time() - newest > STALE_LOCK_S:
        raise EngineError(
            f"{lock} is {(time.time() - newest) / 60:.0f} minutes older than any work beside it: a build was killed; "
            "remove that file"
        )


def _find_ninja() -> None:
    """torch's extension builder looks for ninja on PATH; pip puts it beside the interpreter, which may not be there."""
    beside = Path(sys.executable).parent
    if shutil.which("ninja") is None and (beside / "ninja").exists():
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(beside)])


def is_built() -> bool:
    """Whether the op was compiled before, on this machine and for this Python."""
    folder = Path(_get_build_directory(AsyncIOBuilder().name, verbose=False))
    return (folder / f"{AsyncIOBuilder().name}.so").exists() and not (folder / "lock").exists()


if __name__ == "__main__":  # ahead of time, so that no run waits for the compiler: python -m kit.engines.deepspeed.nvme
    load_async_io()
