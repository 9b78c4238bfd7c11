"""The picture of ``kit explain --png``: step time by component, and the pipeline's schedule. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.errors import SpecError
from kit.report.pipeline_schedule import Drawn, simulate
from kit.report.view import PlanView
from kit.specs.layout import Layout
from kit.units import human_seconds


def draw(view: PlanView, path: Path) -> None:
    """Write a PNG; an existing file is not overwritten. Raises ``SpecError``."""
    if path.exists():
        raise SpecError(f"{path} exists already and is not overwritten; choose another name, or remove it yourself")
    from matplotlib.figure import Figure

    plan, panels = view.plan, 2 if view.drawn else 1
    figure = Figure(figsize=(11, 2.6 * panels + 0.6), layout="constrained")
    axes: Any = figure.subplots(panels, 1, squeeze=False)
    _breakdown(view, axes[0][0])
    if view.drawn:
        _schedule(plan.layout, view.drawn, axes[1][0])
    figure.suptitle(f"{plan.model.name} on {plan.cluster.num_gpus} x {plan.cluster.gpu.name}: {view.layout}")
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}") from None


def _breakdown(view: PlanView, axis: Any) -> None:
    left = 0.0
    for name, seconds in view.shown_s.items():
        axis.barh(0, seconds, left=left, label=f"{name} {human_seconds(seconds)}")
        left += seconds
    axis.set_yticks([])
    axis.set_xlabel("seconds of a step")
    axis.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.3), frameon=False)


_COLORS = {"forward": ("lightsteelblue", "steelblue"), "backward": ("mediumaquamarine", "seagreen")}
"""Two colours for each pass: even and odd virtual stages. The chart of a step uses none of them."""


def _schedule(layout: Layout, drawn: Drawn, axis: Any) -> None:
    stages, vp, batches = drawn
    named = set()
    for entry in simulate(*drawn):
        way, parity = "backward" if entry.backward else "forward", entry.chunk % 2
        label = way if vp == 1 else f"{way}, virtual stage {entry.chunk + 1}"
        axis.barh(
            entry.stage,
            entry.end - entry.start,
            left=entry.start,
            color=_COLORS[way][parity],
            edgecolor="white",
            height=0.9,
            label=None if label in named else label,
        )
        named.add(label)
    axis.set_yticks(range(stages))
    axis.invert_yaxis()
    axis.set_ylabel("stage")
    axis.set_xlabel(
        f"time of forward passes of a chunk; white: idle ({stages} of {layout.pp} stages, {batches} of "
        f"{layout.gradient_accumulation_steps} micro batches, {vp} of {layout.vp} virtual stages drawn)"
    )
    axis.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.3), frameon=False)
