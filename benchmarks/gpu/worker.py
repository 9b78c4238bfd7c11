"""One row, in a process of its own: ``python -m benchmarks.gpu.worker SPEC.json``, the result in a file beside it."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Skipped
from kit.errors import KitError
from kit.preflight.check_result import require
from kit.preflight.versions import check_versions
from kit.training.__main__ import leave

MODULES = {"peaks": "peaks", "case": "measured", "peer": "peers", "curves": "devices"}
"""Kind of a row → what measures it."""


def outcome(spec: dict[str, Any]) -> dict[str, Any]:
    """``status``: ok, refused (by kit, before or while it is built), skipped, out of memory, failed."""
    try:
        require(check_versions())
        return {"status": "ok", **_run(spec)}
    except Skipped as reason:
        return {"status": "skipped", "why": str(reason)}
    except Exception as error:
        if (lack := out_of_memory(error)) is not None:
            return {"status": "out of memory", "why": _short(str(lack))}
        if isinstance(error, KitError):
            return {"status": "refused", "why": _short(str(error))}
        if isinstance(error, ImportError):
            return {"status": "skipped", "why": f"not installed: {_short(str(error))}"}
        traceback.print_exc()
        return {"status": "failed", "why": _short(f"{type(error).__name__}: {error}")}


LACK_OF_MEMORY = ("out of memory", "can't allocate memory", "_STATUS_ALLOC_FAILED")
"""torch's words, the driver's (page-locked host memory too), and those of CUDA's libraries."""


def out_of_memory(error: BaseException) -> BaseException | None:
    """The error that says so: this one, or one that it was raised from, as compilers and engines wrap them."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ == "OutOfMemoryError" or isinstance(seen, MemoryError):
            return seen
        if isinstance(seen, RuntimeError) and any(words in str(seen) for words in LACK_OF_MEMORY):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def _run(spec: dict[str, Any]) -> dict[str, Any]:
    """Imports what the kind needs alone: a package that one lacks is missing in its own rows."""
    scratch, device, kind = Path(spec["scratch"]), spec["device"], spec["kind"]
    if kind == "ops":  # compiled before anything is timed; the row is ok where some are not there, and says which
        from kit.engines.deepspeed import ops

        return {"ops": ops.compile_all()}
    module = importlib.import_module(f"benchmarks.gpu.{MODULES[kind]}")
    if kind == "curves":
        return dict(module.curves(spec["engine"], spec["on"], device, scratch, Path(spec["curves"])))
    return dict(module.measure(spec["name"], device, scratch))


def _short(text: str, length: int = 400) -> str:
    """One line, without the paths of this machine."""
    words = (
        word if not word.lstrip("'\"(").startswith("/") else "…" + word[word.rfind("/") :] for word in text.split()
    )
    line = " ".join(words)
    return line if len(line) <= length else line[: length - 1] + "…"


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(given["out"]).write_text(json.dumps(outcome(given)), encoding="utf-8")  # an error is a row too: exit code 0
    leave(0)
