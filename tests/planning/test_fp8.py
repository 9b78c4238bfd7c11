"""What fp8 by torchao is predicted to do: linear layers alone are faster, and no copies of weights are kept."""

from __future__ import annotations

import dataclasses

import pytest

from kit.cost.hardware import peak_flops_per_s
from kit.cost.time.step import StepTimer
from kit.cost.workload import Workload
from kit.planner.make_plan import make_plan
from kit.specs.catalog import load_model
from kit.specs.layout import Layout, Pins
from tests.support.models import cluster, job, torch

MODEL = load_model("llama-3.2-1b")
FAST = torch(compile_layers=True, chunked_loss=True, micro_batch_size=4, gradient_accumulation_steps=16)
EIGHT = {"precision": "fp8"}


def step_s(precision: str, layout: Layout = FAST, gpus: str = "1xH100", model: str = "llama-3.2-1b") -> float:
    parts = StepTimer().components_s(Workload(load_model(model), cluster(gpus), job(precision=precision), layout))
    return sum(parts.values())


def test_larger_layers_gain_more() -> None:
    """Published: 1.12 to 1.25 for 8B on 8 H100 (kit/engines/kernels/fp8.py)."""
    sharded = dataclasses.replace(FAST, zero_stage=3, dp=8, gradient_accumulation_steps=4)
    gain = step_s("bf16", sharded, "8xH100", "llama-3.1-8b") / step_s("fp8", sharded, "8xH100", "llama-3.1-8b")
    assert step_s("bf16") / step_s("fp8") < gain < 1.3


def test_the_search_takes_compiled_blocks_and_says_what_bf16_would_take() -> None:
    plan = make_plan(MODEL, cluster("1xH100"), job(**EIGHT))
    assert (plan.layout.engine, plan.layout.compile_layers) == ("torch", True)
    said = next(decision for decision in plan.decisions if decision.rule == "precision")
    assert "bf16, the same layout" in said.rejected[0]


def test_a_plan_for_processors_says_that_it_is_emulated() -> None:
    small = dataclasses.replace(MODEL, name="small", num_layers=2, vocab_size=256)
    plan = make_plan(small, cluster("2xcpu"), job(**EIGHT, seq_length=128), Pins(engine="torch"))
    assert next(decision for decision in plan.decisions if decision.rule == "precision").why.startswith("emulated")


@pytest.mark.parametrize(("gpu", "tflops"), [("L4", 242.0), ("L40S", 733.0), ("H100", 1978.8)])
def test_peaks_are_the_catalogs(gpu: str, tflops: float) -> None:
    assert peak_flops_per_s(cluster(f"1x{gpu}").gpu, "fp8") == pytest.approx(tflops * 1e12, rel=1e-3)
