"""Probe a stage of a plan: trace two small depths of the real model and extrapolate the exact slope of a layer.

What a stage holds is linear in its layers, once a layer is inside: states by construction, activations because every
layer keeps the same and the fullest moment (loss, or the first layer's backward) stays where it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace

from kit.cost.pipeline import stage_layers
from kit.diagnose.probe.result import Held, Probed, predicted
from kit.errors import KitError
from kit.planner.decisions import describe
from kit.planner.plan import Plan
from kit.units import to_gib

DEPTHS = (1, 2)
"""Layers of each chunk."""
WHOLE = 2
"""Models of so few layers a chunk are traced whole."""


class ProbeError(KitError):
    """A plan that the probe cannot build."""


def probe(plan: Plan, stage: int = 0) -> Probed:
    """Measure one stage of a plan. Patches torch for good where the plan is Megatron's: a process of its own.

    Raises ProbeError for a stage that is not there and for implementations that need their own kernels.
    """
    layout = plan.layout
    if not 0 <= stage < layout.pp:
        raise ProbeError(f"stage={stage} of a plan with pp={layout.pp}; use 0 to {layout.pp - 1}")
    if layout.implementation == "transformer-engine":
        raise ProbeError(
            "implementation=transformer-engine has kernels of its own, which fake tensors do not run; its predictions "
            "are compared with measured rows (docs/accuracy.md)"
        )
    began = time.perf_counter()
    layers = len(stage_layers(plan.model, layout, stage)) / layout.vp
    depths: tuple[int, ...] = (int(layers),) if layers <= WHOLE and layers == int(layers) else DEPTHS
    traced = [_trace(_shallow(plan, depth), stage) for depth in depths]
    measured = traced[0] if len(traced) == 1 else _line(traced[0], traced[1], layers)
    return Probed(
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


def _line(one: Held, two: Held, layers: float) -> Held:
    values = {
        field.name: getattr(one, field.name) + (layers - 1) * (getattr(two, field.name) - getattr(one, field.name))
        for field in fields(Held)
    }
    return Held(**values)


def _trace(plan: Plan, stage: int) -> Held:
    if plan.layout.implementation == "torch-native":
        from kit.diagnose.probe import megatron

        return megatron.trace(plan, stage)
    from kit.diagnose.probe import huggingface

    return huggingface.trace(plan, stage)


def render(plan: Plan, found: Sequence[Probed]) -> str:
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
