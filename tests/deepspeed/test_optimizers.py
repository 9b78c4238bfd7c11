"""SGD at every ZeRO stage and Adafactor at stage 0: beside torch's own, over stages, bytes, and resumes to the bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.cost.memory.peak import parts_of
from kit.engines.base import StateKind
from kit.planner.plan import Plan
from kit.specs.job import OptimizerName, OptimizerSpec
from kit.training.checkpoint.transfer import export_exchange, import_exchange
from tests.deepspeed import cases
from tests.deepspeed.plain import Curve, curve_error, reference
from tests.training.cases import COUNTERS
from tests.workers import pool

TRIED: list[tuple[OptimizerName, int]] = [("sgd", 0), ("sgd", 1), ("sgd", 2), ("sgd", 3), ("adafactor", 0)]
KINDS = {"sgd": StateKind.EXP_AVG, "adafactor": StateKind.EXP_AVG_SQ}
PLAIN = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2, weight_decay=0.1, foreach=False),
}


def plan(name: OptimizerName, stage: int, **changes: Any) -> Plan:
    chosen = cases.plan(stage, **changes)
    return dataclasses.replace(chosen, job=dataclasses.replace(chosen.job, optimizer=OptimizerSpec(name=name)))


def train(chosen: Plan, start: Path, directory: Path, fault: bool = False) -> dict[str, Any]:
    """Two steps, both checkpoints, one more; and that again by engines that read the files."""
    kind, counters = KINDS[chosen.job.optimizer.name], dataclasses.replace(COUNTERS, step=2, optimizer_steps=2)
    engine = cases.build(chosen, start, directory)
    losses, norms, _ = cases.advance(engine, chosen, 0, 2)
    (directory / "native").mkdir(exist_ok=True)
    engine.save(directory / "native")
    export_exchange(engine, directory / "exchange", counters, model=chosen.model)
    last = cases.advance(engine, chosen, 2, 3)[:2]
    held, ends = engine.held_bytes()["optimizer"], cases.exported(engine, StateKind.MASTER)
    moments = cases.exported(engine, kind)
    engine.close()
    found = {"curve": Curve([*losses, *last[0]], [*norms, *last[1]], {}, ends), "held": held}
    for way in ("native", "exchange"):
        engine = cases.build(chosen, None, directory)
        if way == "native":
            engine.load(directory / "native")
        else:
            import_exchange(engine, directory / "exchange")
        if fault:
            for _, master in engine._state.master_weights():
                engine._state._adam.state[master]["momentum_buffer"].zero_()
        cases.advance(engine, chosen, 2, 3)
        assert engine.optimizer_steps == 3
        masters, again = cases.exported(engine, StateKind.MASTER), cases.exported(engine, kind)
        engine.close()
        found[way] = all(torch.equal(masters[name], ends[name]) for name in ends) and all(
            torch.equal(again[name], moments[name]) for name in moments
        )
        found[f"{way} error"] = max((float((masters[name] - ends[name]).abs().max()) for name in ends), default=0.0)
    return found


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    return cases.hf_directory(tmp_path_factory.mktemp("start"))


@pytest.mark.parametrize(("name", "stage"), TRIED)
def test_steps_bytes_and_resumes(start, tmp_path, name, stage):
    chosen = plan(name, stage)
    found = pool("deepspeed", 2).run(train, chosen, start, tmp_path)[0]
    expected, curve = reference(start, 3, build=PLAIN[name]), found["curve"]
    assert curve_error(curve.losses, expected.losses) < 1e-5
    error = max(float((curve.masters[n] - t).norm() / t.norm()) for n, t in expected.masters.items())
    print(f"| {name} | ZeRO-{stage} | {error:.1e} |")
    assert error < 1e-5
    assert found["native"]
    # Adafactor's factors are computed again from their product.
    assert found["exchange"] or (name == "adafactor" and found["exchange error"] < 1e-7)
    if name == "sgd":
        assert found["held"] == pytest.approx(parts_of(chosen.workload, 0).states.optimizer, rel=0.01)


def test_bf16_keeps_masters_and_momentum_in_fp32(start, tmp_path):
    """At stage 0 DeepSpeed creates the state by a real step, in which SGD adds weight decay to its momentum."""
    found = {}
    for stage in (0, 2):
        ranks = pool("deepspeed", 2).run(train, plan("sgd", stage, precision="bf16"), start, tmp_path / str(stage))
        found[stage] = ranks[0]
        assert found[stage]["native"]
        assert found[stage]["exchange"]
    masters = [each["curve"].masters for each in found.values()]
    # bf16 gradients are summed in another order.
    assert max(float((masters[1][n] - t).norm() / t.norm()) for n, t in masters[0].items()) < 1e-3


def test_a_lost_momentum_is_seen(start, tmp_path):
    found = pool("deepspeed", 2).run(train, plan("sgd", 0), start, tmp_path, True)[0]
    assert not found["native"]
    assert not found["exchange"]


def test_sgd_over_megatrons_tensor_parallelism(start, tmp_path):
    split = {"implementation": "local", "tp": 2, "dp": 1, "sp": True, "gradient_accumulation_steps": 4}
    found = pool("megatron", 2).run(train, plan("sgd", 2, **split), start, tmp_path)[0]
    expected, curve = reference(start, 3, build=PLAIN["sgd"]), found["curve"]
    assert max(float((curve.masters[n] - t).norm() / t.norm()) for n, t in expected.masters.items()) < 1e-5
    assert found["native"]
    assert found["exchange"]
