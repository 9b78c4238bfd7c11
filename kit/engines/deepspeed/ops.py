"""DeepSpeed's compiled ops: built on first use or ahead of time, under locks that end with their builder."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, FusedAdamBuilder
from torch.utils import cpp_extension

from kit.errors import EngineError
from kit.preflight.requirements import INSTALL_LIBAIO, NO_LIBAIO


class BuildLock:
    """The lock of an op's build directory, in place of torch's ``FileBaton`` (torch/utils/file_baton.py).

    torch creates a file and removes it afterwards: that of a build that was killed blocks every later build for ever.
    The kernel releases this lock when its process ends, on network file systems too.
    """

    def __init__(self, path: str) -> None:
        """``path``: of torch's lock file, which is left alone: ``.kit`` is appended."""
        self._descriptor = os.open(f"{path}.kit", os.O_CREAT | os.O_RDWR, 0o666)

    def try_acquire(self) -> bool:
        """Whether this process builds now."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def wait(self) -> None:
        """Wait until the builder is done, or dead: then torch finds no library and says so."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        self.release()

    def release(self) -> None:
        """Let the next process build."""
        os.close(self._descriptor)


def prepare_builds() -> None:
    """Call before anything may be compiled: where ops are built, by which ninja, under which lock.

    Ops are kept in the environment whose headers they were compiled with, unless ``TORCH_EXTENSIONS_DIR`` names a
    directory or the environment is not writable. torch's default is one directory for all environments of a Python
    version; ninja compiles again where the paths of headers have changed, so two environments there undo each other's
    minutes of work at every start.
    """
    if os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    # torch takes the first ninja on PATH, and another ninja than last time builds everything again: always take the one
    # that pip put beside the interpreter, with or without an activated environment.
    beside, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    if (Path(beside) / "ninja").exists() and path.split(os.pathsep)[0] != beside:
        os.environ["PATH"] = os.pathsep.join([beside, path])
    cpp_extension.FileBaton = BuildLock  # type: ignore[attr-defined, assignment]


def load_async_io() -> None:
    """DeepSpeed's binding to libaio, compiled on first use. Raises EngineError that names what is missing."""
    prepare_builds()
    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise EngineError(f"{NO_LIBAIO}; {INSTALL_LIBAIO}")
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
    on CUDA also DeepSpeed's two Adams (engine.py, get_optimizer_configuration)."""
    prepare_builds()
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


def library() -> Path:
    """The compiled op that NVMe needs, of this machine and this Python; it exists once it was built."""
    prepare_builds()
    name = AsyncIOBuilder().name
    return Path(cpp_extension._get_build_directory(name, verbose=False)) / f"{name}.so"


if __name__ == "__main__":  # ahead of time, so that no run waits for the compiler: python -m kit.engines.deepspeed.ops
    missing = [f"{name}: {why}" for name, why in compile_all().items() if isinstance(why, str)]
    sys.exit("error: " + "; ".join(missing) if missing else 0)
