"""Curves of two runs, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BOUNDS = {"loss": 1e-5, "grad_norm": 1e-3}
"""Relative, at each of the first steps in fp32: the order of sums differs, nothing else. Adam begins by signs, which
amplifies it in the norm."""


def differences(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], steps: int) -> dict[str, float]:
    """Largest relative difference of ``loss`` and ``grad_norm`` over steps 1 to ``steps``; infinite where a step is
    missing. A step that was made twice, before and after a restart, counts both times."""
    theirs = {row["step"]: row for row in expected}
    wanted = set(range(1, steps + 1))
    if not wanted <= {row["step"] for row in found} or not wanted <= theirs.keys():
        return {"loss": float("inf"), "grad_norm": float("inf")}
    return {
        key: max(abs(row[key] - theirs[row["step"]][key]) / abs(theirs[row["step"]][key]) for row in found)
        for key in ("loss", "grad_norm")
    }


def agree(worst: dict[str, float]) -> bool:
    """Whether every difference is within its bound."""
    return all(worst[key] <= bound for key, bound in BOUNDS.items())
