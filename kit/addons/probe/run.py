"""Probes a stage of a plan: traces the real model at two small depths and extrapolates linearly to the full depth.

States are linear in the number of layers. Peak activations are linear once the peak is at a moment when the activations
of all layers exist (the loss, or the first layer's backward). One layer may be too few for that: with wide models and
short sequences the gradient of one weight may be larger, and FSDP2 gathers two layers at a time. So the probe doubles
the depth until the peak grows by the bytes that forward saves per layer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from kit.addons.probe.result import MemorySnapshot, ProbeResult, predicted
from kit.cost.model.pipeline import stage_layers
from kit.errors import KitError
from kit.planner.plan import Plan
from kit.specs.layout import describe
from kit.specs.text import refuse
from kit.units import to_gib

DEEPEST = 16
"""Layers of a chunk at which doubling ends in any case."""
SAME_SLOPE = 0.02
"""Largest relative difference between the growth of the peak and the bytes that forward saves per layer."""


class ProbeError(KitError):
    """A plan that the probe cannot build."""


def probe(plan: Plan, stage: int = 0) -> ProbeResult:
    """Measures one stage of a plan. For a Megatron plan it patches torch permanently, so use a separate process.

    Raises ProbeError for a stage that does not exist, and for implementations with their own kernels.
    """
    layout = plan.layout
    reasons = {
        f"stage={stage} of a plan with pp={layout.pp}; use 0 to {layout.pp - 1}": not 0 <= stage < layout.pp,
        "implementation=transformer_engine has kernels of its own, which fake tensors do not run; its predictions are "
        "compared with measured rows (docs/accuracy.md)": layout.implementation == "transformer_engine",
    }
    refuse(reasons, ProbeError)
    began = time.perf_counter()
    layers = len(stage_layers(plan.model, layout, stage)) / layout.vp
    # In such models input gradients outlive their layer. Backward then exceeds the loss only at larger depths, so the
    # full depth is traced.
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
        from kit.addons.probe import megatron

        return megatron.trace(plan, stage)
    from kit.addons.probe import huggingface

    return huggingface.trace(plan, stage)


def render(plan: Plan, found: Sequence[ProbeResult]) -> str:
    """A table of measured and predicted GiB, one line per stage and quantity."""
    layout, all_states = plan.layout, all(each.with_states for each in found)
    rows = [
        (each.stage, name, getattr(each.measured, name), getattr(each.predicted, name), error)
        for each in found
        for name, error in (("states", each.states_error), ("activations", each.activations_error))
        if error is not None
    ]
    lines = [
        f"{plan.model.name}, {describe(layout)}: {layout.implementation} on fake tensors",
        f"  {'stage':<6}{'':14}{'measured':>10}{'predicted':>11}{'error':>8}   GiB",
        *(
            f"  {stage:<6}{name:<14}{to_gib(measured):>10.2f}{to_gib(expected):>11.2f}{error:>+8.1%}"
            for stage, name, measured, expected, error in rows
        ),
        *["  DeepSpeed's states are measured on real processes: docs/deepspeed-bytes.md"] * (not all_states),
    ]
    return "\n".join(lines)
