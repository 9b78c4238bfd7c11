"""What NVIDIA's data-centre GPU manager says of this machine: ``dcgmi diag -r 1 -j``, its tests of seconds (libraries,
permissions, page retirement, the GPU's own records), which disturb no job.

The JSON differs between versions: under "DCGM GPU Diagnostic" with "gpu_ids" (3.x) or "DCGM Diagnostic" with entities
(4.x), warnings as text or as objects with a severity; so it is walked and not unpacked (github.com/NVIDIA/DCGM,
nvvs/src/JsonOutput and testing/python3/tests, read 2026-11-22).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LIMIT_S = 15
A_SETTING = 5
"""dcgm_errors.h, DCGM_ERROR_CONFIG: a setting of the node (persistence mode, …), not a fault of its hardware."""


@dataclass(frozen=True)
class Problem:
    """A test that did not pass."""

    test: str
    gpu: str
    """Its index, or several; empty where the test is of the machine."""
    failed: bool
    """False for a warning, and for a setting."""
    said: str


def query() -> str | None:
    """Output of dcgmi; None where it is not installed. Raises OSError, or TimeoutExpired where its daemon hangs."""
    try:
        done = subprocess.run(["dcgmi", "diag", "-r", "1", "-j"], capture_output=True, text=True, timeout=LIMIT_S)
    except FileNotFoundError:
        return None
    if "{" not in done.stdout:  # the exit code is not 0 either where a test failed
        raise OSError(f"dcgmi: {(done.stdout + done.stderr).strip()[:200] or f'exit code {done.returncode}'}")
    return done.stdout


def parse(text: str) -> tuple[Problem, ...]:
    """Tests that did not pass. Raises ValueError where there is no JSON, or no test in it."""
    data = json.loads(text[text.index("{") : text.rindex("}") + 1])
    tests = list(_tests(data))
    if not tests:
        raise ValueError("dcgmi's answer holds no test")
    return tuple(problem for test in tests for result in test["results"] if (problem := _problem(test, result)))


def _tests(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if isinstance(node.get("results"), list) and "name" in node:
            yield node
        else:
            for inner in node.values():
                yield from _tests(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _tests(inner)


def _problem(test: dict[str, Any], result: dict[str, Any]) -> Problem | None:
    status = str(result.get("status", "")).lower()
    if not status.startswith(("fail", "warn", "error")):
        return None
    said, severities = [], []
    told = result.get("warnings") or result.get("info") or "no reason given"
    for warning in told if isinstance(told, list) else [told]:
        said.append(str(warning.get("warning", warning) if isinstance(warning, dict) else warning))
        severities.append(warning.get("error_severity") if isinstance(warning, dict) else None)
    a_setting = bool(severities) and all(severity == A_SETTING for severity in severities)
    gpu = str(result.get("gpu_ids", result.get("entity_id", "")))
    return Problem(str(test["name"]), gpu, not status.startswith("warn") and not a_setting, "; ".join(said)[:300])
