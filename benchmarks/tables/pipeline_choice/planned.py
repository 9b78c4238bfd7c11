"""What PipelineModule could reach at size, by the planner, beside what it would choose: docs/pipeline-choice.md.

Its schedule is Megatron-core's 1F1B, so Megatron's own times stand for it, held to what it has: layers whole on a rank
(tp=1), plain stages (vp=1) and ZeRO-1.
"""

from __future__ import annotations

from pathlib import Path

import kit
from kit.errors import PlanError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "pipeline-choice.md"
BEGIN, END = "<!-- generated: python -m benchmarks.tables.pipeline_choice -->", "<!-- end -->"
JOB = kit.JobSpec(seq_length=4096, global_batch_size=512)
PLACES = (("llama-3.1-8b", "16xA100-40", (2, 4, 8)), ("llama-3-70b", "64xA100-80", (8, 16)))


def table() -> str:
    """Markdown."""
    lines = ["| model, GPUs | layout | GiB a GPU | bubble | a step | beside the planner's choice |"]
    lines += ["|---|---|---:|---:|---:|---:|"]
    for model, gpus, depths in PLACES:
        best = kit.plan(model, gpus, JOB)
        lines.append(_row(model, gpus, f"chosen: {_sizes(best)}", best, best.predicted.step_time_s))
        for pp in depths:
            pins = kit.Pins(engine="megatron", tp=1, cp=1, vp=1, pp=pp, zero_stage=1)
            try:
                found = kit.plan(model, gpus, JOB, pins)
            except PlanError:
                lines.append(f"| {model}, {gpus} | pp={pp} alone | does not fit | | | |")
                continue
            lines.append(_row(model, gpus, f"pp={pp} alone", found, best.predicted.step_time_s))
    return "\n".join(lines)


def updated(page: str) -> str:
    """The page with its table made again."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


def _row(model: str, gpus: str, name: str, plan: kit.Plan, best_s: float) -> str:
    predicted = plan.predicted
    slower = predicted.step_time_s / best_s - 1
    cells = [f"{predicted.peak_gib:.0f}", f"{predicted.bubble_fraction:.1%}", f"{predicted.step_time_s:.1f} s"]
    return f"| {model}, {gpus} | {name} | {' | '.join(cells)} | {f'+{slower:.0%}' if slower else ''} |"


def _sizes(plan: kit.Plan) -> str:
    layout = plan.layout
    sizes = [f"{name}={getattr(layout, name)}" for name in ("tp", "pp", "vp", "dp") if getattr(layout, name) > 1]
    return f"{layout.engine}, {', '.join(sizes)}"
