"""One row, in a process of its own: ``python -m benchmarks.gpu.worker SPEC.json``, the result in a file beside it."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from kit.errors import KitError


def main() -> int:
    """Exit code 0 also where the row is an error: what happened is in the file."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    row = outcome(spec)
    Path(spec["out"]).write_text(json.dumps(row), encoding="utf-8")
    return 0


def outcome(spec: dict[str, Any]) -> dict[str, Any]:
    """``status``: ok, refused (by kit, before or while it is built), skipped, out of memory, failed."""
    from benchmarks.gpu.peers import Skipped

    try:
        return {"status": "ok", **_run(spec)}
    except Skipped as reason:
        return {"status": "skipped", "why": str(reason)}
    except KitError as error:
        return {"status": "refused", "why": _short(str(error))}
    except ImportError as error:
        return {"status": "skipped", "why": f"not installed: {error}"}
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            return {"status": "out of memory", "why": _short(str(error))}
        traceback.print_exc()
        return {"status": "failed", "why": _short(f"{type(error).__name__}: {error}")}


def _run(spec: dict[str, Any]) -> dict[str, Any]:
    scratch, device = Path(spec["scratch"]), spec["device"]
    match spec["kind"]:
        case "peaks":
            from benchmarks.gpu import peaks

            return peaks.measure(device, scratch)
        case "case":
            from benchmarks.gpu import measured

            return measured.measure(spec["name"], device, scratch)
        case "peer":
            from benchmarks.gpu import peers

            return peers.measure(spec["name"], device, scratch)
        case "curves":
            from benchmarks.gpu import devices

            return devices.curves(spec["engine"], spec["on"], device, scratch, Path(spec["curves"]))
        case kind:
            raise ValueError(f"kind={kind!r}; use peaks, case, peer or curves")


def _short(text: str, length: int = 400) -> str:
    """One line, without the paths of this machine."""
    words = (
        word if not word.lstrip("'\"(").startswith("/") else "…" + word[word.rfind("/") :] for word in text.split()
    )
    line = " ".join(words)
    return line if len(line) <= length else line[: length - 1] + "…"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of gloo and of Triton outlive the interpreter otherwise (kit/training/__main__.py, leave)
