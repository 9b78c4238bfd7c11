"""Probe a stage of a plan: trace two small depths of the real model and extrapolate the exact slope of a layer.

States are linear in a stage's layers. So is every moment of activations; the fullest one is linear as soon as it is one
at which all layers are kept (the loss, or the first layer's backward), which for wide models on short sequences is not
so at one layer: gradients of one weight may be more, and FSDP2 gathers two layers at a time. Depths are doubled until
the slope is that of what forward keeps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from kit.cost.model.pipeline import stage_layers
from kit.diagnose.probe.result import MemorySnapshot, ProbeResult, predicted
from kit.errors import KitError
from kit.planner.describe import describe
from kit.planner.plan import Plan
from kit.units import to_gib

DEEPEST = 16
"""Layers of a chunk at which doubling ends in any case."""
SAME_SLOPE = 0.02
"""How far the fullest moment may grow by more or less than what forward keeps of a layer."""


class ProbeError(KitError):
    """A plan that the probe cannot build."""


def probe(plan: Plan, stage: int = 0) -> ProbeResult:
    """Measure one stage of a plan. Patches torch for good where the plan is Megatron's: a process of its own.

    Raises ProbeError for a stage that is not there and for implementations that need their own kernels.
    """
    layout = plan.layout
    if not 0 <= stage < layout.pp:
        raise ProbeError(f"stage={stage} of a plan with pp={layout.pp}; use 0 to {layout.pp - 1}")
    if layout.implementation == "transformer_engine":
        raise ProbeError(
            "implementation=transformer_engine has kernels of its own, which fake tensors do not run; its predictions "
            "are compared with measured rows (docs/accuracy.md)"
        )
    began = time.perf_counter()
    layers = len(stage_layers(plan.model, layout, stage)) / layout.vp
    # There gradients outlive their layer, so backward overtakes the loss at a depth that small ones do not show.
    overtakes = layout.recompute == "full" and plan.model.num_experts > 0
    depth = int(layers) if overtakes else 1
    traced = {depth: _trace(_shallow(plan, depth), stage)}
    while 2 * depth < layers and depth < DEEPEST:
        traced[2 * depth] = _trace(_shallow(plan, 2 * depth), stage)
        one, two = traced[depth], traced[2 * depth]
        keeps = two.kept - one.kept
        if abs(two.activations - one.activations - keeps) <= SAME_SLOPE * keeps:
            break
        depth *= 2
    if 1 < layers <= 2 * depth and layers not in traced:
        traced[int(layers)] = _trace(_shallow(plan, int(layers)), stage)
    depths = tuple(sorted(traced))[-2:]
    measured = traced[depth] if len(depths) == 1 else _line(depths, traced, layers)
    return ProbeResult(
        stage=stage,
        measured=measured,
        predicted=predicted(plan, stage),
        with_states=layout.engine != "deepspeed",
        layers_traced=depths,
        seconds=time.perf_counter() - began,
    )


def _shallow(plan: Plan, depth: int) -> Plan:
    """The plan with ``depth`` layers in every chunk."""
    layout = replace(plan.layout, first_stage_layers=None, last_stage_layers=None)
    return replace(plan, model=replace(plan.model, num_layers=depth * layout.pp * layout.vp), layout=layout)


def _line(depths: tuple[int, ...], traced: Mapping[int, MemorySnapshot], layers: float) -> MemorySnapshot:
    less, more = depths
    one, two = traced[less], traced[more]
    share = (layers - less) / (more - less)
    values = {
        field.name: getattr(one, field.name) + share * (getattr(two, field.name) - getattr(one, field.name))
        for field in fields(MemorySnapshot)
    }
    return MemorySnapshot(**values)


def _trace(plan: Plan, stage: int) -> MemorySnapshot:
    if plan.layout.implementation == "local":
        from kit.diagnose.probe import megatron

        return megatron.trace(plan, stage)
    from kit.diagnose.probe import huggingface

    return huggingface.trace(plan, stage)


def render(plan: Plan, found: Sequence[ProbeResult]) -> str:
    """A table of measured and predicted GiB, a line a stage and quantity."""
    layout = plan.layout
    lines = [
        f"{plan.model.name}, {describe(layout)}: {layout.implementation} on fake tensors",
        f"  {'stage':<6}{'':14}{'measured':>10}{'predicted':>11}{'error':>8}   GiB",
    ]
    for each in found:
        rows = [("states", each.measured.states, each.predicted.states)] if each.with_states else []
        rows += [("activations", each.measured.activations, each.predicted.activations)]
        for name, measured, expected in rows:
            error = f"{expected / measured - 1:+.1%}"
            values = f"{to_gib(measured):>10.2f}{to_gib(expected):>11.2f}{error:>8}"
            lines.append(f"  {each.stage:<6}{name:<14}{values}")
    if not all(each.with_states for each in found):
        lines.append("  DeepSpeed's states are measured on real processes: docs/deepspeed-bytes.md")
    return "\n".join(lines)
