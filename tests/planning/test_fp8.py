"""What fp8 by torchao is predicted to do: linear layers alone are faster, and no copies of weights are kept."""

from __future__ import annotations

import dataclasses

import pytest

from kit.cost.hardware import peak_flops_per_s
from kit.cost.memory.peak import peak_gib
from kit.cost.model.params import count
from kit.cost.time.gpu import gpu_perf
from kit.cost.time.layer import head_s
from kit.cost.time.step import step_time_components_s
from kit.cost.workload import Workload
from kit.planner.make_plan import make_plan
from kit.specs.catalog import load_model
from kit.specs.layout import Layout, Pins
from kit.units import GIB
from tests.support.models import cluster, job, torch

MODEL = load_model("llama-3.2-1b")
FAST = torch(compile_layers=True, chunked_loss=True, micro_batch_size=4, gradient_accumulation_steps=16)
EIGHT = {"precision": "fp8"}


def step_s(precision: str, layout: Layout = FAST, gpus: str = "1xH100", model: str = "llama-3.2-1b") -> float:
    parts = step_time_components_s(Workload(load_model(model), cluster(gpus), job(precision=precision), layout))
    return sum(parts.values())


def test_compiled_it_is_faster_and_operator_by_operator_it_is_not() -> None:
    assert 1.05 < step_s("bf16") / step_s("fp8") < 1.6
    slow = dataclasses.replace(FAST, compile_layers=False)
    assert step_s("fp8", slow) > step_s("bf16", slow)


def test_larger_layers_gain_more() -> None:
    """Published: 1.12 to 1.25 for 8B on 8 H100 (kit/engines/kernels/fp8.py)."""
    sharded = dataclasses.replace(FAST, zero_stage=3, dp=8, gradient_accumulation_steps=4)
    gain = step_s("bf16", sharded, "8xH100", "llama-3.1-8b") / step_s("fp8", sharded, "8xH100", "llama-3.1-8b")
    assert step_s("bf16") / step_s("fp8") < gain < 1.3


def test_the_head_stays_in_sixteen_bits() -> None:
    times = []
    for precision in ("bf16", "fp8"):
        the_job = job(precision=precision)
        workload = Workload(MODEL, cluster("1xH100"), the_job, FAST)
        how = workload.execution
        gpu = gpu_perf(cluster("1xH100"), how.precision, how.attention, how.linear_layers_only)
        times.append(head_s(gpu, workload))
        assert (gpu.matmul == gpu.others) == (precision == "bf16")
    assert times[0] == times[1]


def test_experts_stay_in_sixteen_bits() -> None:
    """A model whose layers are experts for the most part gains next to nothing, even without the casts."""
    sharded = torch(zero_stage=3, dp=8, gradient_accumulation_steps=8, compile_layers=True)
    assert step_s("fp8", sharded, "8xH200", "mixtral-8x7b") > 0.9 * step_s("bf16", sharded, "8xH200", "mixtral-8x7b")


def test_no_copies_of_weights_are_kept_where_they_are_fp32() -> None:
    layout = dataclasses.replace(FAST, recompute="none", micro_batch_size=1)
    in_bf16, in_fp8 = (peak_gib(Workload(MODEL, cluster("1xH200"), job(precision=p), layout)) for p in ("bf16", "fp8"))
    copies = 2.0 * count(MODEL).layer_matrices / GIB
    assert in_bf16 - in_fp8 == pytest.approx(copies, rel=0.01)


def test_the_search_takes_compiled_blocks_and_says_what_bf16_would_take() -> None:
    plan = make_plan(MODEL, cluster("1xH100"), job(**EIGHT))
    assert (plan.layout.engine, plan.layout.compile_layers) == ("torch", True)
    said = next(decision for decision in plan.decisions if decision.rule == "precision")
    assert "bf16, the same layout" in said.rejected[0]


def test_a_plan_for_processors_says_that_it_is_emulated() -> None:
    small = dataclasses.replace(MODEL, name="small", num_layers=2, vocab_size=256)
    plan = make_plan(small, cluster("2xcpu"), job(**EIGHT, seq_length=128), Pins(engine="torch"))
    said = next(decision for decision in plan.decisions if decision.rule == "precision")
    assert said.why.startswith("emulated")


@pytest.mark.parametrize(("gpu", "tflops"), [("L4", 242.0), ("L40S", 733.0), ("H100", 1978.8)])
def test_peaks_are_the_catalogs(gpu: str, tflops: float) -> None:
    assert peak_flops_per_s(cluster(f"1x{gpu}").gpu, "fp8") == pytest.approx(tflops * 1e12, rel=1e-3)
