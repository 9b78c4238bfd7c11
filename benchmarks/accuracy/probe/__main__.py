"""Probe every case, write the page and the figures, fail where the cost model is off by more than its limits.

python -m benchmarks.accuracy.probe
"""

from __future__ import annotations

from typing import Any

from benchmarks.accuracy.probe.cases import CASES
from benchmarks.accuracy.probe.plans import probed
from kit.units import GIB
from tests.support import ROOT
from tests.support.page import header, row, table, write_json
from tests.support.program import run

PAGE = ROOT / "docs" / "probe.md"
RESULTS = ROOT / "benchmarks" / "results" / "probe.json"
STATES, ACTIVATIONS = 0.03, 0.08
"""Relative error allowed."""


def main() -> int:
    """Exit code 1 where cost model and probe disagree."""
    rows = []
    for found in probed(CASES):
        rows.append(found)
        print(row(cells(found)), flush=True)
    PAGE.write_text(page(rows), encoding="utf-8")
    write_json(RESULTS, rows)
    wrong = [row for row in rows if not agrees(row)]
    print(f"{PAGE.relative_to(ROOT)}: {len(CASES)} plans, {len(rows)} stages, {len(wrong)} differ")
    return 1 if wrong else 0


def agrees(row: dict[str, Any]) -> bool:
    """Within the limits."""
    return abs(row["states_error"] or 0.0) <= STATES and bool(abs(row["activations_error"]) <= ACTIVATIONS)


def cells(found: dict[str, Any]) -> list[str]:
    """One row of the table, without the verdict."""

    def three(names: tuple[str, ...], error: float) -> list[str]:
        sizes = (sum(found[where][name] for name in names) / GIB for where in ("measured", "predicted"))
        return [*(f"{size:.2f}" for size in sizes), f"{error:+.1%}"]

    states = found["states_error"]
    with_states = ["", "", ""] if states is None else three(("weights", "gradients", "optimizer"), states)
    return [found["name"], str(found["stage"]), *with_states, *three(("activations",), found["activations_error"])]


def page(rows: list[dict[str, Any]]) -> str:
    """docs/probe.md."""
    wrong = sum(not agrees(row) for row in rows)
    errors = sorted(abs(row["activations_error"]) for row in rows)
    lines = [
        header("The cost model against the probe", "make prove NAME=probe"),
        "The real model of each plan runs a step on fake tensors (`kit/addons/probe`), which computes nothing;",
        "the probe counts every storage while it exists. Figures are GiB of one rank. *states* are weights,",
        "gradients at the end of backward and optimizer state. *the rest* is the peak of activations, logits, loss",
        "and gathered weights. Two depths are traced and extrapolated linearly. DeepSpeed's states are measured in",
        "real processes instead ([deepspeed-bytes](deepspeed-bytes.md)). A probe does not see CUDA's own memory,",
        "workspaces of libraries, the allocator's rounding, and uneven routing of experts.",
        "",
        f"{len(dict.fromkeys(row['name'] for row in rows))} plans, {len(rows)} stages; {wrong} off by more than "
        f"{STATES:.0%} (states) or {ACTIVATIONS:.0%} (the rest). Median error of the rest: "
        f"{errors[len(errors) // 2]:.2%}, largest {errors[-1]:.1%}.",
        "",
    ]
    heads = ("plan", "stage", "states", "predicted", "error", "the rest", "predicted", "error")
    return "\n".join([*lines, table(heads, map(cells, rows), right=True)]) + "\n"


if __name__ == "__main__":
    run(main)
