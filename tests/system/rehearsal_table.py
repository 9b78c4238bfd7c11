"""``recipes/README.md``: every recipe with its plan's predictions and the evidence there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kit.planner.plan import Plan
from kit.specs.catalog import cheapest_node_with
from kit.specs.layout import describe
from kit.specs.shipped import headline, recipe_names, recipe_path
from scripts.shipped_files import shipped_plan
from tests.support.page import header, table

HEADS = ("recipe", "layout", "GiB a GPU", "tokens/s", "days", "cost", "checkpoint", "evidence", "date", "command")
ROWS = 100_000
"""Rows for which days and cost of a recipe by epochs are shown, each as long as its seq_length."""
WHOLE = "all of them"
"""Key of the last whole run in the evidence."""


def page(evidence: dict[str, Any]) -> str:
    """``recipes/README.md``."""
    rows = [_row(name, shipped_plan(name), evidence.get(name)) for name in recipe_names()]
    shown = [row[HEADS.index("evidence")].split(":")[0] for row in rows]
    last = f"{shown.count('rehearsed')} of {len(rows)} recipes are rehearsed in the layout that the table shows."
    if "accepted" in shown:
        last += f" {shown.count('accepted')} are accepted: their layout is not the one that was rehearsed."
    if WHOLE in evidence:
        last += f" The last run of all (`make prove NAME=rehearse-all`): {whole_run(evidence[WHOLE])}."
    what = "\n".join(f"- **{name}**: {headline(recipe_path(name))}" for name in recipe_names())
    return f"""{header("Recipes", "make prove NAME=rehearse-all")}
`kit recipes copy NAME DIR` writes a directory to run from, `kit emit recipes/NAME.yaml --out DIR` its files alone.
[launch/](../launch/README.md) has six of them whole, one for each way to start. `kit rehearse NAME` repeats the proof
of a recipe.

{last}

The evidence of a recipe is one of these, the weakest first:

- *accepted*: every engine's own parser took its files.
- *rehearsed*: its scaled-down copy trained on CPU processes. The copy keeps the engine, the kinds of parallelism, the
  ZeRO stage, offload and recompute. It was killed, resumed, and compared with plain torch in fp32; transformers loaded
  its export. The table gives the relative differences of loss, gradient norm, loss of the export and exported weights.
  Then the copy trained in the recipe's own precision, or in bf16 for fp16, which a CPU does not have. "In bf16" gives
  the relative differences of loss, gradient norm, Adam's first moments and the update of the weights; rounding must
  explain them.
- *measured*: it ran at full size on the named hardware. No recipe has this evidence yet.

`kit rehearse` lists what the copy replaces. `make prove NAME=rehearse-faults` shows that a fault turns each figure red.
Memory, speed and cost are predictions ([how good they are](../docs/accuracy.md)). Days and cost include checkpoints and
failures; †: of a recipe by epochs, for {ROWS:,} full rows. Hardware without a price, such as a DGX box, is priced per
GPU like the cheapest catalog node with the same GPU; "–" means that no such node has a price.

{table(HEADS, rows)}

## Purpose of each recipe

{what}
"""


def _row(name: str, plan: Plan | None, record: dict[str, Any] | None) -> tuple[str, ...]:
    if plan is None:
        return (f"[{name}]({name}.yaml)", "has no plan: see the comment in its file", *[""] * 8)
    predicted = plan.predicted
    peak = max(stage.peak_gib for stage in predicted.memory)
    of = ""
    if predicted.days is None:  # epochs of rows that nobody has counted
        predicted, of = predicted.for_steps(ROWS / plan.job.global_batch_size, plan.cluster), " †"
        plan = replace(plan, predicted=predicted)
    days = f"{predicted.total_days:.3g}{of}"
    cost = "–" if (usd := _cost_usd(plan)) is None else f"${usd:,.0f}{of}"
    gb = predicted.operation.checkpoint_gb
    checkpoint = f"{gb:,.0f} GB" if gb >= 1 else f"{gb * 1000:.0f} MB"
    return (
        f"[{name}]({name}.yaml)",
        describe(plan.layout),
        f"{peak:.0f} of {plan.cluster.gpu.memory_gib:.0f}",
        f"{predicted.tokens_per_s:,.0f}",
        days,
        cost,
        checkpoint,
        *_evidence(plan, record),
        f"`kit rehearse {name}`",
    )


def _evidence(plan: Plan, record: dict[str, Any] | None) -> tuple[str, str]:
    """Two cells: what was shown, and when."""
    if record is None or record.get("layout") != describe(plan.layout):
        return "accepted", ""
    when = f"{record['date']} at {record['commit']}"
    if not record["passed"]:
        return "accepted; its rehearsal failed, see evidence.json", when
    return f"rehearsed: {summary(record)}", when


def summary(record: dict[str, Any]) -> str:
    """One line of numbers."""
    figures = [
        f"{record['processes']} processes",
        f"loss {record['loss_difference']:.0e}",
        f"norm {record['norm_difference']:.0e}",
        f"export {record['exported_difference']:.0e}",
    ]
    if "weight_difference" in record:
        figures.append(f"weights {record['weight_difference']:.0e}")
    if (rounded := record.get("in_bf16")) is not None:
        figures.append(
            f"in {rounded.get('precision', 'bf16')} loss {rounded['loss_difference']:.0e}, "
            f"norm {rounded['norm_difference']:.0e}, "
            f"moments {rounded['moment_difference']:.0e}, update {rounded['update_difference']:.0e}"
        )
    return f"{', '.join(figures)}; {record['seconds']:.0f} s"


def whole_run(record: dict[str, Any]) -> str:
    """One line: how long all of them took."""
    return (
        f"{record['passed']} of {record['recipes']} passed, 1 to {record['most_processes']} processes each, "
        f"in {record['minutes']:.0f} minutes on {record['cores']} cores, {record['date']} at {record['commit']}"
    )


def _cost_usd(plan: Plan) -> float | None:
    """Cost of the whole run, on the plan's own nodes or on rented ones with the same GPU. None: not known."""
    if plan.predicted.total_cost_usd is not None:
        return plan.predicted.total_cost_usd
    cheapest = cheapest_node_with(plan.cluster.gpu)
    assert plan.predicted.total_days is not None
    return cheapest and cheapest[1] * plan.cluster.num_gpus * plan.predicted.total_days * 24
