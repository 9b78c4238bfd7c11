"""What the planner knows about slow links: volumes by hand, gains by link, and lossy ways only on request."""

from __future__ import annotations

import dataclasses

import pytest

import kit
from kit.cost.memory.states import state_bytes
from kit.cost.model.compression import (
    INT4_BYTES,
    INT8_BYTES,
    POWERSGD_RANK,
    ZeroPlusPlus,
    gradient_bytes,
)
from kit.cost.model.params import count
from kit.cost.time.data_parallel import zero_times
from kit.cost.time.gpu import gpu_perf
from kit.cost.time.step import step_time_components_s
from kit.cost.workload import Workload
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.cluster import ClusterSpec
from tests.support.models import deepspeed, job, torch

SLOW, FAST = 25 / 8 / 8, 25.0
"""GB/s a GPU: 25 Gbit/s Ethernet a node of eight, and 200 Gbit/s InfiniBand a GPU."""


def nodes(gbytes_per_s: float, gpus: str = "64xA100-80") -> ClusterSpec:
    return dataclasses.replace(parse_cluster(gpus), inter_node_gbytes_per_s=gbytes_per_s)


def times(chosen: ZeroPlusPlus, gbytes_per_s: float = SLOW):
    gpu = gpu_perf(nodes(gbytes_per_s), "bf16")._replace(bytes_per_s=float("inf"))
    return zero_times(gpu, chosen, ranks=64, parameters=8e9, width=2.0, messages=1)


def test_volumes_of_zero_plus_plus_on_a_slow_fabric() -> None:
    """Where the fabric alone counts, times are the paper's volumes: Ψ/2 for qwZ, 0 for hpZ, Ψ/4 divided by a node's
    ranks for qgZ, which leaves a node as a sum."""
    plain = times(ZeroPlusPlus())
    assert plain.first_gather == plain.gather == plain.scatter
    quantised = times(ZeroPlusPlus(weights=True))
    assert quantised.gather / plain.gather == pytest.approx(INT8_BYTES / 2, rel=1e-3)
    near = times(ZeroPlusPlus(hpz=8))
    assert near.first_gather == plain.first_gather
    assert near.gather < 0.01 * plain.gather
    gradients = times(ZeroPlusPlus(gradients=True))
    # 63/64 of Ψ in 16 bits at the node's eight ports against 7/8 of an eighth of Ψ in int4 at one's own.
    by_hand = (7 / 8 * INT4_BYTES / 8 * 8) / (63 / 64 * 2)
    assert gradients.scatter / plain.scatter == pytest.approx(by_hand, rel=0.03)


def test_powersgd_sends_two_thin_factors() -> None:
    model = load_model("llama-3.2-1b")
    h, ffn, kv, vocabulary = 2048, 8192, 512, 128256
    layer = 2 * (h + h) + 2 * (kv + h) + 3 * (ffn + h)
    factors = 4 * POWERSGD_RANK * (16 * layer + vocabulary + h)
    norms = 4 * (16 * 2 + 1) * h
    total = count(model).total
    assert gradient_bytes(model, "powersgd", 4.0, total) * total == pytest.approx(factors + norms, rel=1e-6)
    assert gradient_bytes(model, "bf16", 4.0, total) == 2.0
    assert gradient_bytes(model, "none", 4.0, total) == 4.0
    held = [state_bytes(torch(dp=64, gradient_compression=kind), "bf16").optimizer for kind in ("powersgd", "none")]
    assert held[0] - held[1] == 4.0


def step(cluster: ClusterSpec, layout) -> float:
    return sum(step_time_components_s(Workload(load_model("llama-3.2-1b"), cluster, job(), layout)).values())


def test_hooks_gain_on_slow_links_and_cost_on_fast_ones() -> None:
    layouts = {
        kind: torch(dp=64, gradient_accumulation_steps=2, gradient_compression=kind)
        for kind in ("none", "bf16", "powersgd")
    }
    slow = {kind: step(nodes(SLOW), layout) for kind, layout in layouts.items()}
    assert slow["powersgd"] < slow["bf16"] < slow["none"]
    fast = {kind: step(nodes(FAST), layout) for kind, layout in layouts.items()}
    assert fast["powersgd"] > fast["none"]  # its products cost more than the link


def test_accumulation_gathers_across_nodes_once_a_step_with_a_second_copy() -> None:
    """Each further micro batch costs a gather and a scatter more without hpZ, and only the scatter with it."""

    def cost(m: int, hpz: int) -> float:
        layout = deepspeed(dp=64, zero_stage=3, gradient_accumulation_steps=m, zero_hpz=hpz)
        return step_time_components_s(Workload(load_model("llama-3.1-8b"), nodes(SLOW), job(), layout))["data_parallel"]

    plain = cost(2, 1) - cost(1, 1)
    copied = cost(2, 8) - cost(1, 8)
    assert copied / plain == pytest.approx(1 / 3, abs=0.03)


def test_the_planner_takes_the_lossless_and_names_the_lossy() -> None:
    pins = kit.Pins(engine="deepspeed", zero_stage=3)
    wanted = kit.JobSpec(seq_length=4096, global_batch_size=256)
    slow = kit.plan("llama-3.1-8b", nodes(SLOW), wanted, pins)
    assert slow.layout.zero_hpz == 8
    assert not slow.layout.zero_quantized_weights
    (remark,) = [decision for decision in slow.decisions if decision.rule == "gradient_compression"]
    assert any("zero_quantized_gradients" in line for line in remark.rejected)
    for quiet in (nodes(FAST), parse_cluster("8xA100-80")):
        fast = kit.plan("llama-3.1-8b", quiet, wanted, pins)
        assert not [decision for decision in fast.decisions if decision.rule == "gradient_compression"]
    assert fast.layout.zero_hpz == 1  # one node has no slower links to spare
