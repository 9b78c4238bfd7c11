"""The field's example of 70B on 8 p4d nodes, and what fits there in its place: rows of ``recipes/README.md``."""

from __future__ import annotations

from kit.planner.describe import describe
from kit.planner.memory_report import memory_report
from kit.planner.search import make_plan
from kit.specs.layout import Pins
from kit.specs.recipe import load_recipe
from kit.specs.shipped import recipe_path

RECIPE = "llama-3-70b-pretrain-zero2-offload-over-megatron-64xa100-40"
_SPLIT = {"tp": 8, "implementation": "local"}
_OVER = {**_SPLIT, "engine": "deepspeed"}

CHOICES: dict[str, Pins] = {
    "TP8 PP2 DP4, ZeRO-1, as quoted": Pins(**_SPLIT, engine="megatron", pp=2, zero_stage=1),
    "TP8 DP8, ZeRO-1": Pins(**_OVER, zero_stage=1, offload_optimizer="none"),
    "TP8 DP8, ZeRO-1, optimizer on the host": Pins(**_OVER, zero_stage=1, offload_optimizer="cpu"),
    "TP8 DP8, ZeRO-2": Pins(**_OVER, zero_stage=2, offload_optimizer="none"),
    "TP8 DP8, ZeRO-2, optimizer on the host: this recipe": Pins(**_OVER, zero_stage=2, offload_optimizer="cpu"),
    "TP8 DP8, ZeRO-3": Pins(**_OVER, zero_stage=3, offload_optimizer="none"),
    "TP8 PP4 DP2, ZeRO-1": Pins(**_SPLIT, engine="megatron", pp=4, zero_stage=1),
    "nothing pinned: the planner's best": Pins(),
}
"""Recompute and micro batch are the planner's: those with which it fits, or misses by least."""


def section() -> str:
    """A table of what each needs."""
    recipe = load_recipe(recipe_path(RECIPE))
    rows = []
    for what, pins in CHOICES.items():
        report = memory_report(recipe.model, recipe.cluster, recipe.job, pins)
        over = report.peak_gib - report.usable_gib
        speed = "–"
        if over <= 0:
            plan = make_plan(recipe.model, recipe.cluster, recipe.job, pins)
            speed = f"{plan.predicted.tokens_per_s:,.0f}"
        verdict = f"no: {over:.1f} too many" if over > 0 else "yes"
        needed = f"{report.peak_gib:.1f} of {report.usable_gib:.1f}"
        rows.append(f"| {what} | {describe(report.layout)} | {needed} | {verdict} | {speed} |")
    return f"""## 70B on 64 A100 of 40 GB

The field quotes TP8 PP2 DP4 under DeepSpeed's ZeRO-1 over Megatron's tensor parallelism. ZeRO over Megatron has no
pipeline here, so the first row is that split under Megatron's own distributed optimizer, which shards the same state.

| split | nearest layout | GiB a GPU, of usable | fits | tokens/s |
|---|---|---|---|---|
{chr(10).join(rows)}
"""
