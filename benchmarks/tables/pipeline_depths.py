"""The table of docs/pipeline-choice.md: what PipelineModule could reach at size, beside what the planner chooses.

Its schedule is Megatron-core's 1F1B, so Megatron's own times stand for it, held to what it has: layers whole on a rank
(tp=1), plain stages (vp=1) and ZeRO-1.
"""

from __future__ import annotations

import kit
from kit.errors import PlanError
from tests.support.page import table

JOB = kit.JobSpec(seq_length=4096, global_batch_size=512)
PLACES = (("llama-3.1-8b", "16xA100-40", (2, 4, 8)), ("llama-3-70b", "64xA100-80", (8, 16)))
HEADS = ("model, GPUs", "layout", "GiB a GPU", "bubble", "a step", "beside the planner's choice")


def text() -> str:
    """Markdown."""
    rows: list[tuple[str, ...]] = []
    for model, gpus, depths in PLACES:
        where, best = f"{model}, {gpus}", kit.plan(model, gpus, JOB)
        rows.append((where, f"chosen: {_sizes(best)}", *_figures(best, best)))
        for pp in depths:
            pins = kit.Pins(engine="megatron", tp=1, cp=1, vp=1, pp=pp, zero_stage=1, offload_optimizer="none")
            pins = pins.but(optimizer_state_dtype="fp32")  # no last resort
            try:
                figures = _figures(kit.plan(model, gpus, JOB, pins), best)
            except PlanError:
                figures = ("does not fit", "", "", "")
            rows.append((where, f"pp={pp} alone", *figures))
    return table(HEADS, rows, right=True)


def _figures(plan: kit.Plan, best: kit.Plan) -> tuple[str, str, str, str]:
    predicted = plan.predicted
    slower = predicted.step_time_s / best.predicted.step_time_s - 1
    sizes = f"{predicted.peak_gib:.0f}", f"{predicted.bubble_fraction:.1%}", f"{predicted.step_time_s:.1f} s"
    return *sizes, f"+{slower:.0%}" if slower else ""


def _sizes(plan: kit.Plan) -> str:
    layout = plan.layout
    sizes = [f"{name}={getattr(layout, name)}" for name in ("tp", "pp", "vp", "dp") if getattr(layout, name) > 1]
    return f"{layout.engine}, {', '.join(sizes)}"
