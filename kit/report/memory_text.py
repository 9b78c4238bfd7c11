"""A memory report as text with bars."""

from __future__ import annotations

from rich.text import Text

from kit.cost.memory.peak import COMPONENTS, StageMemory
from kit.cost.model.params import count
from kit.report.memory_report import FitReport
from kit.report.view import by_component, cells
from kit.specs.layout import describe
from kit.specs.sizes import MADE
from kit.units import human_count

_BAR = 60
"""Columns of a full GPU."""
LOOKS = {
    "weights": ("█", "#4e79a7"),
    "gradients": ("▓", "#f28e2b"),
    "optimizer": ("▒", "#e15759"),
    "activations": ("░", "#59a14f"),
    "logits": ("◆", "#b07aa1"),
    "buffers": ("+", "#edc948"),
    "overhead": ("·", "#9c9c9c"),
}
"""Component → (its mark without colours, its colour)."""


def picture(report: FitReport) -> Text:
    """A table by stage and component, and one bar per stage; coloured if the terminal has colours."""
    model, cluster, job = report.model, report.cluster, report.job
    size = human_count(count(model).total)
    shown = by_component(report.stages)
    lines = [
        f"{model.name}, {size} parameters, on {cluster.num_gpus} x {cluster.gpu.name} ({cluster.name}); "
        f"{job.precision}, sequences of {job.seq_length}, {job.global_batch_size} a step",
        *([f"  {model.source}"] if model.source.startswith(MADE) else []),
        f"  {describe(report.layout)}",
        "",
        f"{report.verdict}: {report.peak_gib:.1f} of {report.usable_gib:.1f} GiB usable ({report.memory_gib:.1f} "
        f"total); largest: {report.binding}",
        "",
        "  stage " + "".join(f"{name:>12}" for name in [*shown, "peak"]) + "   GiB",
    ]
    lines += [f"  {stage.stage:<6}{cells(stage, shown)}" for stage in report.stages]
    text = Text("\n".join(lines) + "\n\n")
    for stage in report.stages:
        text.append_text(_bar(stage, report)).append("\n")
    text.append("        ")
    for name in shown:
        mark, colour = LOOKS[name]
        text.append(mark, style=colour).append(f" {name}   ")
    text.append("| usable")
    for line in [*_moments(report), *_node_lines(report), *report.reasons]:
        text.append(f"\n{line}")
    return text


def _bar(stage: StageMemory, report: FitReport) -> Text:
    """Draws a stage's components in one bar. Its full width is the fullest stage or the GPU, whichever is larger."""
    scale = _BAR / max(report.memory_gib, report.peak_gib)
    bar, sum_gib = Text(), 0.0
    for name in COMPONENTS:
        start = round(sum_gib * scale)
        sum_gib += stage.components_gib[name]
        mark, colour = LOOKS[name]
        bar.append(mark * (round(sum_gib * scale) - start), style=colour)
    bar.append(" " * (_BAR - len(bar)))
    limit = round(report.usable_gib * scale)
    return Text(f"  {stage.stage:<6}") + bar[:limit] + Text("|", style="bold") + bar[limit:]


def _moments(report: FitReport) -> list[str]:
    """Lines with the peak of each phase, of the fullest stage."""
    fullest = max(report.stages, key=lambda stage: stage.peak_gib)
    if not fullest.phases_gib:
        return []
    sizes = ", ".join(f"{name} {size:.1f}" for name, size in fullest.phases_gib.items())
    return [f"  peaks of stage {fullest.stage} by moment, GiB: {sizes}"]


def _node_lines(report: FitReport) -> list[str]:
    """Lines about host memory, disks, and changes that help."""
    host, disks = (
        "" if gib is None else f"of {gib:.0f} " for gib in (report.cluster.host_ram_gib, report.cluster.nvme_gib)
    )
    needs = (
        ("host memory", report.host_ram_gib_per_node, host),
        ("host memory while loading,", report.host_load_gib_per_node, host),
        ("NVMe", report.nvme_gib_per_node, disks),
    )
    lines = [f"  {name} of a node: {needed:.0f} {of}GiB" for name, needed, of in needs if needed]
    return lines + [f"it fits with {change}" for change in report.changes]
