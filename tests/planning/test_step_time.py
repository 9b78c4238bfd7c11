"""Communication volumes, pipelines and FLOPs against their formulas."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from kit.cost import predict
from kit.cost.collectives import group
from kit.cost.hardware import shared
from kit.cost.memory.peak import peak_gib
from kit.cost.model.flops import model_flops_per_token
from kit.cost.time.layer import expert_gemms
from kit.cost.time.step import StepTimer, bubble_fraction, step_time_components_s
from kit.cost.workload import Workload
from kit.specs.catalog import load_model
from kit.specs.layout import Layout
from tests.support.models import cluster, deepspeed, job, megatron


def test_a_ring_moves_what_the_formula_says() -> None:
    ring = group(cluster("8xH100"), 8, 1)
    bandwidth = 450e9 * shared().intra_node_link
    hops = 7 * shared().intra_node_hop_us * 1e-6
    assert ring.all_gather_s(8e9) == pytest.approx(7 / 8 * 8e9 / bandwidth + hops)
    assert ring.all_reduce_s(8e9) == pytest.approx(2 * ring.all_gather_s(8e9))
    assert group(cluster("8xH100"), 1, 1).all_reduce_s(8e9) == 0


def test_ranks_of_a_node_share_the_ring_between_their_ports() -> None:
    nodes = cluster("64xH100")
    port = 50e9 * shared().inter_node_link
    assert group(nodes, 8, 8).bytes_per_s == pytest.approx(port)  # one rank a node: one port
    assert group(nodes, 32, 2).bytes_per_s == pytest.approx(4 * port)
    assert group(nodes, 64, 1).bytes_per_s == pytest.approx(8 * port)
    fast_fabric = dataclasses.replace(nodes, inter_node_gbytes_per_s=100.0)
    assert group(fast_fabric, 64, 1).bytes_per_s == pytest.approx(450e9 * shared().intra_node_link)  # NVLink limits


@pytest.mark.parametrize(
    ("pp", "vp", "m", "expected"), [(1, 1, 8, 0), (4, 1, 8, 3 / 11), (4, 2, 8, 3 / 19), (8, 1, 1, 7 / 8)]
)
def test_bubble(pp: int, vp: int, m: int, expected: float) -> None:
    layout = megatron(pp=pp, vp=vp, gradient_accumulation_steps=m)
    assert bubble_fraction(layout) == pytest.approx(expected)


def test_the_bubble_component_is_its_fraction_of_an_otherwise_perfect_step() -> None:
    # Without a vocabulary worth the name all stages take the same time, but for the look-up.
    model = dataclasses.replace(load_model("llama-3-70b"), vocab_size=8)
    machines = cluster("64xA100-80")
    layout = megatron(tp=8, pp=8, sp=True, gradient_accumulation_steps=128)
    parts = step_time_components_s(Workload(model, machines, job(), layout))
    busy = parts["compute"] + parts["recompute"] + parts["tensor_parallel"]
    assert parts["pipeline_bubble"] / (busy + parts["pipeline_bubble"]) == pytest.approx(
        bubble_fraction(layout), rel=2e-3
    )


def test_causal_model_flops() -> None:
    """6N' + 6·L·s·a·d a token, N' the matrices without the input embedding (the convention of NeMo since 25.09)."""
    model = load_model("llama-3-8b")
    matrices = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) + 4096 * 128256
    assert model_flops_per_token(model, 8192) == 6 * matrices + 6 * 32 * 8192 * 4096


def test_mfu_is_flops_over_time_and_peak() -> None:
    model, machines, the_job = load_model("llama-3-8b"), cluster("8xH100"), job()
    prediction = predict(
        Workload(model, machines, the_job, deepspeed(zero_stage=3, dp=8, gradient_accumulation_steps=16))
    )
    tokens = 128 * 4096
    flops = tokens * model_flops_per_token(model, 4096)
    assert prediction.mfu == pytest.approx(flops / prediction.step_time_s / (8 * 989.4e12))
    assert prediction.tokens_per_s == pytest.approx(tokens / prediction.step_time_s)
    assert prediction.days == pytest.approx(100e9 / prediction.tokens_per_s / 86400)


def test_money_is_nodes_times_hours() -> None:
    machines = cluster("p4d.24xlarge:8")
    layout = megatron(tp=8, dp=8, gradient_accumulation_steps=16)
    prediction = predict(Workload(load_model("llama-3-8b"), machines, job(), layout))
    assert prediction.cost_usd == pytest.approx(21.957642 * 8 * 24 * prediction.days)
    assert predict(Workload(load_model("llama-3-8b"), cluster("64xA100-40"), job(), layout)).cost_usd is None


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2", "qwen3-8b"])
def test_recompute_trades_a_forward_pass_for_memory(name: str) -> None:
    model, machines, the_job = load_model(name), cluster("8xH100"), job(seq_length=1024)
    kept = deepspeed(zero_stage=2, dp=8, micro_batch_size=4, gradient_accumulation_steps=4)
    again = dataclasses.replace(kept, recompute="full")
    assert peak_gib(Workload(model, machines, the_job, again)) < peak_gib(Workload(model, machines, the_job, kept))
    parts = step_time_components_s(Workload(model, machines, the_job, again))
    assert 0.2 < parts["recompute"] / parts["compute"] < 1 / 3


def test_the_fullest_stage_is_the_first_or_the_last() -> None:
    model, machines = load_model("llama-3-70b"), cluster("64xA100-80")
    for vp in (1, 2):
        layout = megatron(tp=4, pp=8, vp=vp, sp=True, dp=2, gradient_accumulation_steps=64)
        prediction = predict(Workload(model, machines, job(), layout))
        assert prediction.peak_gib == pytest.approx(peak_gib(Workload(model, machines, job(), layout)))


def test_sharding_more_never_needs_more_memory() -> None:
    model, machines, the_job = load_model("llama-3-8b"), cluster("8xH100"), job()
    peaks = [
        peak_gib(Workload(model, machines, the_job, deepspeed(zero_stage=stage, dp=8, gradient_accumulation_steps=16)))
        for stage in (0, 1, 2, 3)
    ]
    # Stage 1 accumulates in fp32 beside bf16 gradients, which stage 0 cannot do at all.
    assert peaks[3] < peaks[2] < min(peaks[0], peaks[1])


def test_tensor_parallelism_of_dtensor_waits_for_its_exchanges() -> None:
    """DTensor sends as much as Megatron without sequence parallelism, but none of it overlaps GEMMs."""
    model, machines = load_model("llama-2-13b"), cluster("8xH100")
    layout = Layout(engine="torch", implementation="huggingface", tp=2, dp=4, zero_stage=3, micro_batch_size=1)
    exposed = step_time_components_s(Workload(model, machines, job(), layout))["tensor_parallel"]
    one_way = 2 * group(machines, 2, 1).all_reduce_s(4096 * model.hidden_size * 2.0)
    assert exposed == pytest.approx(2 * model.num_layers * one_way, rel=1e-6)


def test_faster_dispatch_and_overlapped_shared_experts_shorten_a_step() -> None:
    """DeepEP sends a token to a node once, NCCL's all-to-all once for each of its experts there."""
    model, machines = load_model("deepseek-v3"), cluster("64xH100")
    usual = megatron(ep=32, dp=64, recompute="full", gradient_accumulation_steps=4)

    def expert_parallel(**changes: object) -> float:
        layout = dataclasses.replace(usual, **changes)  # type: ignore[arg-type]
        return step_time_components_s(Workload(model, machines, job(), layout))["expert_parallel"]

    sends = 4 * (1 - (1 - 1 / 4) ** model.experts_per_token)  # of 4 nodes, those that have one of a token's 8 experts
    dispatch = expert_parallel(moe_token_dispatcher="deepep") / expert_parallel()
    assert dispatch == pytest.approx(sends / model.experts_per_token, rel=0.15)
    overlapped = expert_parallel(moe_shared_expert_overlap=True)
    assert 0.3 * expert_parallel() < overlapped < expert_parallel()
    assert expert_parallel(overlap_moe_expert_parallel_comm=True, recompute="none") < overlapped


VALUES: dict[str, tuple[Any, ...]] = {
    "implementation": ("local", "transformer_engine"),
    "tp": (1, 2),
    "pp": (1, 4),
    "vp": (1, 2),
    "cp": (1, 2),
    "cp_comm_type": ("all_gather", "p2p", "a2a"),
    "ep": (1, 4),
    "etp": (1, 2),
    "moe_token_dispatcher": ("alltoall", "deepep"),
    "moe_shared_expert_overlap": (False, True),
    "overlap_moe_expert_parallel_comm": (False, True),
    "sp": (False, True),
    "zero_stage": (0, 1),
    "recompute": ("none", "selective", "full"),
    "chunked_loss": (False, True),
    "compile_layers": (False, True),
    "attention_kernel": ("default", "cudnn"),
    "gradient_compression": ("none", "bf16"),
    "micro_batch_size": (1, 2),
    "gradient_accumulation_steps": (4, 8),
}


@pytest.mark.parametrize("engine", ["megatron", "torch", "deepspeed"])
def test_times_of_layers_are_shared_by_equal_layers_alone(engine: str) -> None:
    """A search asks one timer for thousands of layouts. It answers as a timer of its own would, in any order."""
    model, machines, shared = load_model("deepseek-v3"), cluster("64xH100"), StepTimer()
    own = {"megatron": VALUES, "torch": VALUES, "deepspeed": VALUES | {"zero_stage": (2, 3)}}[engine]
    if engine != "megatron":
        own = {**own, "implementation": ("huggingface",), "pp": (1,), "vp": (1,), "ep": (1,), "etp": (1,)}
    rng = random.Random(0)
    for _ in range(300):
        chosen = {name: rng.choice(values) for name, values in own.items()}
        workload = Workload(model, machines, job(), Layout(engine=engine, dp=8, **chosen))  # type: ignore[arg-type]
        assert shared.components_s(workload) == StepTimer().components_s(workload), chosen


def test_all_ranks_wait_for_the_fullest_experts() -> None:
    """Twice the load doubles the rows of the experts' GEMMs and the bytes of the all-to-alls, and only with EP."""
    machines, model = cluster("32xH100"), load_model("mixtral-8x7b")
    split = megatron(tp=2, sp=True, ep=8, etp=1, dp=16, gradient_accumulation_steps=8)
    even, uneven = (Workload(model, machines, job(expert_load=load), split) for load in (1.0, 2.0))
    for gemm, fuller in zip(expert_gemms(even)[1:], expert_gemms(uneven)[1:], strict=True):
        assert fuller == (2 * gemm[0], *gemm[1:])
    a, b = step_time_components_s(even), step_time_components_s(uneven)
    assert 1.5 < b["expert_parallel"] / a["expert_parallel"] < 2  # latency stays
    assert b["compute"] > a["compute"]
    assert peak_gib(uneven) > peak_gib(even)
    whole = [each.with_layout(split.but(ep=1, etp=2)) for each in (even, uneven)]
    assert step_time_components_s(whole[0]) == step_time_components_s(whole[1])
