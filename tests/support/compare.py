"""Compare what two runs computed: gradients by Hugging Face name, and curves step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """Gradients of one step by parameter, or a logged quantity by step, against a reference."""

    worst_relative_error: float
    """Largest ‖x − x_ref‖ / ‖x_ref‖; infinite where parameters, their shapes or steps differ."""
    worst: str | int
    """The parameter or the step of that."""
    compared: int


def compare_gradients(reference: Path, other: Path) -> Comparison:
    """Two ``gradients/step-….safetensors`` files. Raises ``OSError`` where one is missing."""
    from safetensors import safe_open

    with safe_open(reference, "pt") as left, safe_open(other, "pt") as right:
        different = set(left.keys()) ^ set(right.keys())
        if different:
            return Comparison(float("inf"), f"in one only: {sorted(different)[0]}", 0)
        errors = {name: _relative(left.get_tensor(name), right.get_tensor(name)) for name in left.keys()}  # noqa: SIM118
    worst = max(errors, key=lambda name: errors[name])
    return Comparison(errors[worst], worst, len(errors))


def compare_curves(
    reference: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], key: str, steps: Sequence[int] | None = None
) -> Comparison:
    """One key of two lists of metric rows, matched by step. ``steps``: only these; without, both have the same ones. A
    step that was made twice, before and after a restart, counts both times."""
    expected = {row["step"]: row[key] for row in reference}
    wanted = set(expected if steps is None else steps)
    found = [(row["step"], row[key]) for row in other if steps is None or row["step"] in wanted]
    missing = (wanted ^ {step for step, _ in found}) | (wanted - expected.keys())
    if missing or not wanted:
        return Comparison(float("inf"), min(missing, default=0), 0)
    worst, step = max((_relative_number(expected[step], value), step) for step, value in found)
    return Comparison(worst, step, len(wanted))


def compare_runs(
    reference: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], steps: Sequence[int] | None = None
) -> dict[str, Comparison]:
    """Loss and gradient norm of two lists of metric rows: see ``compare_curves``."""
    return {key: compare_curves(reference, other, key, steps) for key in ("loss", "grad_norm")}


def _relative_number(reference: float, other: float) -> float:
    difference = abs(other - reference)
    # NaN compares false with everything: it must count as a difference, not vanish in max().
    return difference / abs(reference) if difference == difference and reference else float("inf")


def _relative(reference: Any, other: Any) -> float:
    if reference.shape != other.shape:
        return float("inf")
    reference, other = reference.double(), other.double()
    error = float((other - reference).norm() / reference.norm())
    return error if error == error else float("inf")
