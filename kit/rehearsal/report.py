"""A rehearsal as text: what ran, what it showed, what it could not."""

from __future__ import annotations

from kit.rehearsal.rehearse import (
    CANNOT_SHOW,
    EXPORT_BOUND,
    LOSS_BOUND,
    NORM_BOUND,
    STEPS,
    WEIGHT_BOUND,
    Rehearsal,
)
from kit.rehearsal.rounding import ROUNDED_BOUND


def render(result: Rehearsal) -> str:
    """Text of a rehearsal for the terminal."""
    lines = [
        f"{result.recipe}: {'rehearsed' if result.passed else 'FAILED'} in {result.seconds:.0f} s",
        f"  plan      {result.layout}",
        f"  copy      {result.scaled_down}; {result.processes} processes by {result.launcher}",
        f"  trained   {STEPS} steps; killed after step {result.killed_at}, resumed",
        f"  curve     loss within {result.loss_difference:.1e} of plain torch (bound {LOSS_BOUND:g}), "
        f"gradient norm {result.norm_difference:.1e} ({NORM_BOUND:g})",
        f"  exported  loads in transformers, held-out loss within {result.exported_difference:.1e} ({EXPORT_BOUND:g}), "
        f"weights within {result.weight_difference:.1e} ({WEIGHT_BOUND:g})",
    ]
    if (rounded := result.in_bf16) is not None:
        lines += [
            f"  in {rounded.precision:<6} {STEPS} steps, from plain torch in fp32: loss {rounded.loss_difference:.1e}, "
            f"gradient norm {rounded.norm_difference:.1e}, moments {rounded.moment_difference:.1e} (rounding: "
            f"{rounded.bound:.1e}),",
            f"            added to the weights {rounded.update_difference:.1e} ({rounded.update_bound:.1e}); rounded "
            f"master weights {rounded.rounded_masters:.1e} ({ROUNDED_BOUND:g})",
        ]
    lines += [f"  replaced  {item}" for item in result.replaced]
    lines.append(f"  not shown {'; '.join(CANNOT_SHOW)}")
    return "\n".join(lines)
