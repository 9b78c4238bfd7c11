"""Builds DeepSpeed's compiled ops, on first use or ahead of time. The kernel releases the lock of a build that dies."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, FusedAdamBuilder
from torch.utils import cpp_extension

from kit.errors import EngineError
from kit.files import locked
from kit.preflight.requirements import INSTALL_LIBAIO, NO_LIBAIO


class BuildLock:
    """The lock of an op's build directory, in place of torch's ``FileBaton`` (torch/utils/file_baton.py).

    torch creates a lock file and removes it after the build: if the build is killed, the file blocks all later builds.
    The kernel releases this lock when its process ends, on network file systems too.
    """

    def __init__(self, path: str) -> None:
        """``path``: torch's lock file. The lock is on another file, ``path`` with ``.kit`` appended."""
        self._path, self._held = Path(f"{path}.kit"), ExitStack()

    def try_acquire(self) -> bool:
        """Try to take the lock. True: this process builds."""
        try:
            self._held.enter_context(locked(self._path, wait=False))
        except BlockingIOError:
            return False
        return True

    def wait(self) -> None:
        """Wait until the building process is done or dead. If it is dead, torch finds no library and raises."""
        with locked(self._path):
            pass

    def release(self) -> None:
        """Release the lock."""
        self._held.close()


def prepare_builds() -> None:
    """Set where and how ops are compiled: directory, ninja, architectures, lock. Call it before DeepSpeed compiles.

    The build directory is inside the Python environment, unless ``TORCH_EXTENSIONS_DIR`` names another one or the
    environment is not writable. torch's default directory serves all environments of a Python version. ninja compiles
    again if the paths of headers have changed, so two environments would rebuild each other's ops at every start.
    """
    if os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    # torch takes the first ninja on PATH, and a ninja other than the last one builds everything again. So always take
    # the ninja that pip installed beside the interpreter, even if the environment is not activated.
    beside, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    if (Path(beside) / "ninja").exists() and path.split(os.pathsep)[0] != beside:
        os.environ["PATH"] = os.pathsep.join([beside, path])
    # DeepSpeed (op_builder/builder.py, compute_capability_args) reads numbers alone. Images that build FlashAttention 3
    # name an architecture with its own instructions: 9.0a.
    if architectures := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(?<=\d)[af]", "", architectures)
    cpp_extension.FileBaton = BuildLock  # type: ignore[attr-defined, assignment]


def load_async_io() -> None:
    """Load DeepSpeed's binding to libaio; compiles it on first use. Raises EngineError, which names what is missing."""
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
    """Compile all ops that kit's plans use: ``async_io`` for NVMe, on CUDA also DeepSpeed's two Adams (engine.py,
    get_optimizer_configuration). Returns op → seconds, or op → the reason why it failed."""
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
    """Path of the compiled ``async_io`` library for this machine and this Python. The file exists after its build."""
    prepare_builds()
    name = AsyncIOBuilder().name
    return Path(cpp_extension._get_build_directory(name, verbose=False)) / f"{name}.so"


if __name__ == "__main__":  # ahead of time, so that no run waits for the compiler: python -m kit.engines.deepspeed.ops
    missing = [f"{name}: {why}" for name, why in compile_all().items() if isinstance(why, str)]
    sys.exit("error: " + "; ".join(missing) if missing else 0)
