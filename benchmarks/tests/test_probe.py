"""The cost model against the real model code on fake tensors, in small; full-size plans are in docs/probe.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.tests.probe_small import CASES, LLAMA, case
from kit.addons.probe import run
from kit.addons.probe.result import MemorySnapshot, ProbeResult, predicted
from kit.addons.probe.run import ProbeError, probe
from kit.addons.probe.tracker import LiveBytes
from kit.planner.plan import Plan
from tests.support import ROOT
from tests.support.refusals import refusal

NAMES = [f"{each.name}, stage {stage}" for each in CASES for stage in each.stages]
CLOSE = {
    NAMES[8]: 0.01,  # FSDP2 x TP
    NAMES[14]: 0.01,  # FSDP2 in fp8
    NAMES[17]: 0.02,  # DeepSpeed, LoRA
    NAMES[19]: 0.065,  # Megatron, the last stage of two, sequence parallelism
    NAMES[25]: 0.04,  # Megatron, experts, recomputation
    NAMES[26]: 0.01,  # FSDP2, selective recompute
}
"""A case of every engine and of most kinds of layers, and how far the activations are off."""


@pytest.fixture(scope="module")
def probed(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of the cases that run today."""
    asked = [name for name in NAMES if any(item.name.endswith(f"[{name}]") for item in request.session.items)]
    words = [sys.executable, "-m", "benchmarks.tests.probe_small", *asked]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=one_thread, cwd=ROOT)
    return {each["name"]: each for each in json.loads(done.stdout)}


@pytest.mark.everyday(*list(CLOSE)[:2])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.nightly
def test_cost_model_and_probe_agree(probed: dict[str, Any], name: str) -> None:
    found = probed[name]
    if found["states_error"] is not None:
        assert abs(found["states_error"]) < (0.001 if name in CLOSE else 0.03)
    assert abs(found["activations_error"]) < CLOSE.get(name, 0.08)


def test_live_bytes_come_and_go_with_their_storage() -> None:
    with LiveBytes() as live:
        first = torch.zeros(1000)
        view = first[10:]
        second = first + 1
        assert live.now == 8000
        del first
        assert live.now == 8000, "a view keeps its storage"
        del view
        torch.zeros(1)
        assert (live.now, live.peak) == (4000, 8000)
        second.untyped_storage().resize_(3000)  # as FSDP2 frees gathered weights
        assert live.now == 3000
        live.leave_out([second])
        assert live.now == 0
        del second
        assert live.now == 0


def test_what_autograd_keeps_is_counted_until_backward_has_used_it() -> None:
    weight = torch.zeros(100, requires_grad=True)
    with LiveBytes() as live:
        begin = live.now
        loss = (weight.exp() * 2).sum()
        kept = live.now - begin
        loss.backward()
        assert kept == 400 + 4, "the result of exp, and the loss"
        live.leave_out([weight.grad, loss])  # type: ignore[list-item]
        assert live.now == begin


def test_an_error_is_an_error() -> None:
    held = MemorySnapshot(weights=1.0, gradients=1.0, optimizer=2.0, activations=10.0)
    more = MemorySnapshot(weights=1.0, gradients=1.0, optimizer=3.0, activations=9.0)
    found = ProbeResult(stage=0, measured=held, predicted=more, with_states=True, layers_traced=(1, 2), seconds=0.0)
    assert found.states_error == pytest.approx(0.25)
    assert found.activations_error == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("layers", "least", "pins", "own", "traced"),
    [
        (1, 0.0, {}, 1, (1,)),
        (2, 0.0, {}, 2, (1, 2)),
        (32, 0.0, {}, 32, (1, 2)),
        (32, 150.0, {}, 32, (8, 16)),  # at 1, 2 and 4 layers, and partly at 8, something else is the peak
        (12, 150.0, {}, 12, (8, 12)),
        (12, 0.0, {"pp": 2, "vp": 3}, 2, (1, 2)),
        (15, 0.0, {"pp": 2, "first_stage_layers": 3}, 3, (1, 2)),
    ],
)
def test_depths_double_until_the_peak_grows_by_what_a_layer_keeps(
    layers: int, least: float, pins: dict[str, Any], own: int, traced: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``own``: layers of a chunk of the first stage. For a trace: 10 bytes a layer beside 100, or more at any depth."""

    def trace(plan: Plan, stage: int) -> MemorySnapshot:
        depth = plan.model.num_layers / (plan.layout.pp * plan.layout.vp)
        peak = max(100 + 10 * depth, least)
        return MemorySnapshot(weights=7 * depth, gradients=0.0, optimizer=1.0, activations=peak, kept=10 * depth)

    monkeypatch.setattr(run, "_trace", trace)
    plan = case(LLAMA, "torch", zero_stage=0).plan()
    deep = replace(plan, model=replace(plan.model, num_layers=layers), layout=plan.layout.but(**pins))
    found = probe(deep)
    assert (found.layers_traced, found.with_states) == (traced, True)
    assert found.measured == trace(replace(plan, model=replace(plan.model, num_layers=own)), 0)
    assert "  0     states " in run.render(deep, [found])


def test_a_stage_that_is_not_there() -> None:
    """A stage's chunks are not stages."""
    assert "stage=2 of a plan with pp=2; use 0 to 1" in refusal(
        ProbeError,
        probe,
        case(replace(LLAMA, num_layers=12), "megatron", pp=2, vp=3, gradient_accumulation_steps=2).plan(),
        2,
    )


def test_the_command_prints_measured_and_predicted_bytes(tmp_path: Path) -> None:
    plan = case(LLAMA, "torch", zero_stage=0).plan()
    plan.save(tmp_path / "plan.yaml")
    words = [sys.executable, "-m", "kit", "probe", str(tmp_path / "plan.yaml"), "--json", "--stage", "0"]
    (found,) = json.loads(subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    assert (found["stage"], found["predicted"], found["seconds"] > 0) == (0, vars(predicted(plan, 0)), True)
    assert abs(found["activations_error"]) < 0.08
