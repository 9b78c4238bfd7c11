"""DeepSpeed's compiled ops: built on first use or ahead of time, and never waited for after their builder has died."""

from __future__ import annotations

import fcntl
import glob
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, FusedAdamBuilder
from torch.utils.cpp_extension import _get_build_directory

from kit.errors import EngineError
from kit.preflight.offload import NO_LIBAIO

SILENT_S = 60
"""After it, a lock that no process here has open is a dead builder's: a living one has, from the first moment."""

SILENT_ELSEWHERE_S = 1200
"""The same on a file system of several machines, whose processes cannot be seen: the longest file of an op compiles in
a minute or two, on a crowded machine in a few more."""

SHARED_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "cifs", "9p", "wekafs")


def keep_with_environment() -> None:
    """Compiled ops lie inside of the environment whose headers they were compiled with, unless ``TORCH_EXTENSIONS_DIR``
    names a place or the environment is not writable.

    torch's own place is one folder of the user's for all environments of a Python version. ninja compiles anew where
    the paths of headers have changed, so two environments there undo each other's minutes of work at every start.
    """
    if os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))


def load_async_io() -> None:
    """DeepSpeed's binding to libaio, compiled on first use. Raises EngineError that names what is missing."""
    keep_with_environment()
    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise EngineError(NO_LIBAIO)
    try:
        builder.load(verbose=False)
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EngineError(
            f"DeepSpeed's async_io op could not be built ({reason}); it needs g++ and ninja, "
            "and a writable TORCH_EXTENSIONS_DIR"
        ) from error


def compile_all() -> dict[str, float | str]:
    """Each op that an engine here may ask for, with the seconds it took, or why it is not there: ``async_io`` for NVMe,
    on CUDA also DeepSpeed's two Adams (engine.py, get_optimizer_configuration). Raises EngineError as ``ready``."""
    ready()
    loads: dict[str, Callable[[], object]] = {AsyncIOBuilder().name: load_async_io}
    if get_accelerator().device_name() == "cuda":
        loads |= {builder().name: builder().load for builder in (FusedAdamBuilder, CPUAdamBuilder)}
    found: dict[str, float | str] = {}
    for name, load in loads.items():
        began = time.monotonic()
        try:
            load()
        except (EngineError, RuntimeError, OSError) as error:
            found[name] = str(error).strip().splitlines()[0]
        else:
            found[name] = round(time.monotonic() - began, 1)
    return found


def ready() -> None:
    """Before anything may be compiled: the right ninja, and no lock of a dead builder. Raises EngineError as below."""
    _use_own_ninja()
    remove_dead_locks()


def remove_dead_locks() -> None:
    """A build that was killed leaves a file on which every later one waits for ever (torch, file_baton.py): remove it.

    Waits until it is sure, which takes ``SILENT_S`` seconds at most. Raises EngineError where it cannot be sure.
    """
    for lock in sorted(_builds().glob("*/lock")):
        while lock.exists() and not _is_held(lock):
            if _is_shared(lock):
                _refuse_if_silent(lock)
                break
            if _silent_s(lock) > SILENT_S:
                _remove_unless_held(lock)
            else:
                time.sleep(1)


def is_built() -> bool:
    """Whether the op that NVMe needs was compiled before, on this machine and for this Python."""
    folder = _builds() / AsyncIOBuilder().name
    return (folder / f"{AsyncIOBuilder().name}.so").exists() and not (folder / "lock").exists()


def _builds() -> Path:
    """The folder in which torch keeps one folder for each op of this Python and device."""
    keep_with_environment()
    return Path(_get_build_directory(AsyncIOBuilder().name, verbose=False)).parent


def _is_held(lock: Path) -> bool:
    """Whether a process of this machine has the file open, as its builder has from creation to removal."""
    inode = _identity(lock)
    # Unlike pathlib's, this glob passes over processes that end meanwhile.
    return inode is not None and any(inode == _identity(link) for link in glob.iglob("/proc/[0-9]*/fd/*"))


def _identity(file: str | Path) -> tuple[int, int] | None:
    """Device and inode behind a name; None where it is gone, or another user's process keeps it from us."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _silent_s(lock: Path) -> float:
    """Seconds since the lock, its folder or anything in it was written."""
    return time.time() - max(_written(file) for file in [lock.parent, *lock.parent.iterdir()])


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0  # a compiler's temporary file, gone since it was listed


def _remove_unless_held(lock: Path) -> None:
    """One process at a time, and a last look: the next builder may have removed it and begun already."""
    with (lock.parent.parent / ".kit-locks").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if lock.exists() and not _is_held(lock):
            print(f"kit: removed {lock}: the build that left it was killed", file=sys.stderr)
            lock.unlink()


def _refuse_if_silent(lock: Path) -> None:
    if _silent_s(lock) > SILENT_ELSEWHERE_S:
        raise EngineError(
            f"{lock} is {_silent_s(lock) / 60:.0f} minutes older than any work beside it: a build was killed, here or "
            "on another machine; remove that file"
        )


def _is_shared(file: Path) -> bool:
    """Whether other machines may write there, by the type of the file system that is mounted nearest to the file."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [mount for mount in mounts if file.resolve().is_relative_to(mount[1])]
    nearest = max(reversed(above), key=lambda mount: len(mount[1]))  # of several at one place the last is seen
    return nearest[2].startswith(SHARED_FILE_SYSTEMS)


def _use_own_ninja() -> None:
    """torch's extension builder takes the first ninja on PATH, and another one than last time builds everything again:
    always the one that pip put beside the interpreter, with or without an activated environment."""
    beside, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    if (Path(beside) / "ninja").exists() and path.split(os.pathsep)[0] != beside:
        os.environ["PATH"] = os.pathsep.join([beside, path])


if __name__ == "__main__":  # ahead of time, so that no run waits for the compiler: python -m kit.engines.deepspeed.ops
    try:
        compiled = compile_all()
    except EngineError as error:
        sys.exit(f"error: {error}")
    missing = [f"{name}: {why}" for name, why in compiled.items() if isinstance(why, str)]
    sys.exit("error: " + "; ".join(missing) if missing else 0)
