"""Optimizers other than AdamW at the ZeRO stages that take them: beside their own class on whole tensors in one
process, bytes, and resumes to the bit."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch

from kit.cost.memory.peak import parts_of
from kit.engines.protocol import StateKind
from kit.planner.plan import Plan
from kit.specs.job import OptimizerName, OptimizerSpec
from kit.specs.optimizers import OPTIMIZERS
from tests.deepspeed import cases
from tests.deepspeed.plain import Curve, curve_error, reference
from tests.support.checkpoints import export, load
from tests.support.workers import pool
from tests.training.cases import COUNTERS

STAGES: dict[OptimizerName, tuple[int, ...]] = {
    "sgd": (0, 1, 2, 3),
    "adafactor": (0,),
    "adamw-8bit": (0, 1, 2, 3),
    "lion-8bit": (0, 1, 2, 3),
}
TRIED = [(name, stage) for name, stages in STAGES.items() for stage in stages]
OWN = {"betas": (0.9, 0.95), "weight_decay": 0.1, "min_8bit_size": 33}
"""Norms have 32 elements, and fp32 moments. Matrices are whole blocks, halved or not, and so are flat partitions."""
EPS = 1e-3
"""Large: early Adam is sign descent."""
ROUNDED_AGAIN = 0.0141 / 2
"""Half of the largest gap between codes (arXiv 2110.02861, section 2.2): most that importing 8-bit moments changes, of
their block's largest."""
PLAIN = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2, weight_decay=0.1, foreach=False),
    "adamw-8bit": lambda groups: bitsandbytes.optim.AdamW8bit(groups, eps=EPS, **OWN),
    "lion-8bit": lambda groups: bitsandbytes.optim.Lion8bit(groups, **OWN),
}


def plan(name: OptimizerName, stage: int, **changes: Any) -> Plan:
    chosen = cases.plan(stage, **changes)
    return dataclasses.replace(chosen, job=dataclasses.replace(chosen.job, optimizer=OptimizerSpec(name=name, eps=EPS)))


def train(chosen: Plan, start: Path, directory: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, one more; and that again by engines that read it, as one of the same layout and not."""
    counters = dataclasses.replace(COUNTERS, step=2, optimizer_steps=2)
    with closing(cases.build(chosen, start, directory)) as engine:
        losses, norms, _ = cases.advance(engine, chosen, 0, 2)
        export(engine, directory / "step", chosen, counters)
        saved = exported_moments(engine, chosen)
        last = cases.advance(engine, chosen, 2, 3)[:2]
        held, ends = engine.memory_bytes()["optimizer"], cases.exported(engine, StateKind.MASTER)
        moments = exported_moments(engine, chosen)
    found = {"curve": Curve([*losses, *last[0]], [*norms, *last[1]], {}, ends), "held": held}
    for way in ("same layout", "any layout"):
        with closing(cases.build(chosen, None, directory)) as engine:
            load(engine, directory / "step", chosen, same_layout=way == "same layout")
            if way == "any layout":
                read = exported_moments(engine, chosen)
                errors = ((read[key] - each).abs().max() / each.abs().max() for key, each in saved.items())
                found["imported"] = float(max(errors, default=0.0))
            cases.advance(engine, chosen, 2, 3)
            assert engine.optimizer_steps == 3
            masters, again = cases.exported(engine, StateKind.MASTER), exported_moments(engine, chosen)
        found[way] = all(torch.equal(masters[name], ends[name]) for name in ends) and all(
            torch.equal(again[name], moments[name]) for name in moments
        )
        found[f"{way} error"] = largest(masters, ends)
    return found


def largest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest ‖found − expected‖ / ‖expected‖ of a parameter."""
    return max((float((found[name] - t).norm() / t.norm()) for name, t in expected.items()), default=0.0)


def exported_moments(engine: Any, chosen: Plan) -> dict[tuple[str, str], torch.Tensor]:
    """By kind and name, on the main rank."""
    kinds = map(StateKind, OPTIMIZERS[chosen.job.optimizer.name].state)
    return {(kind, name): tensor for kind in kinds for name, tensor in cases.exported(engine, kind).items()}


@pytest.mark.everyday("sgd-0", "adafactor-0", "adamw-8bit-2", "lion-8bit-3")
@pytest.mark.parametrize(("name", "stage"), TRIED)
def test_steps_bytes_and_resumes(start, tmp_path, name, stage):
    chosen = plan(name, stage)
    found = pool("deepspeed", 2).run(train, chosen, start, tmp_path)[0]
    expected, curve = reference(start, 3, build=PLAIN[name]), found["curve"]
    assert curve_error(curve.losses, expected.losses) < 1e-5
    assert largest(curve.masters, expected.masters) < 1e-5
    assert found["same layout"]
    # Adafactor's factors are computed again from their product.
    within = {"adafactor": 1e-6, "adamw-8bit": ROUNDED_AGAIN, "lion-8bit": ROUNDED_AGAIN}
    assert found["any layout"] or found["imported"] <= within.get(name, 0.0)
    if name != "adafactor":
        assert found["held"] == pytest.approx(parts_of(chosen.workload, 0).states.optimizer, rel=0.01)


@pytest.mark.everyday("sgd-stages0")
@pytest.mark.parametrize(("name", "stages"), [("sgd", (0, 2)), ("adamw-8bit", (0, 1, 2, 3))])
def test_bf16_keeps_masters_and_moments(start, tmp_path, name, stages):
    """At stage 0 DeepSpeed creates the state by a real step, in which SGD adds weight decay to its momentum. Stage 1
    has another optimizer where bf16 gradients are summed in fp32."""
    found = {}
    for stage in stages:
        ranks = pool("deepspeed", 2).run(train, plan(name, stage, precision="bf16"), start, tmp_path / str(stage))
        found[stage] = ranks[0]
        assert found[stage]["same layout"]
        assert found[stage]["any layout"] or 0 < found[stage]["imported"] <= ROUNDED_AGAIN
    masters = [each["curve"].masters for each in found.values()]
    # bf16 gradients are summed in another order, and go to other codes.
    assert max(largest(each, masters[0]) for each in masters[1:]) < (1e-3 if name == "sgd" else 5e-3)


@pytest.mark.everyday("sgd")
@pytest.mark.parametrize("name", ["sgd", "adamw-8bit"])
def test_over_megatrons_tensor_parallelism(start, tmp_path, name):
    split = {"implementation": "local", "tp": 2, "dp": 1, "sp": True, "gradient_accumulation_steps": 4}
    found = pool("megatron", 2).run(train, plan(name, 2, **split), start, tmp_path)[0]
    expected = reference(start, 3, build=PLAIN[name]).masters
    assert largest(found["curve"].masters, expected) < (1e-5 if name == "sgd" else 5e-3)  # blocks of other elements
    assert found["same layout"]
    assert found["any layout"] or 0 < found["imported"] <= ROUNDED_AGAIN
