"""What the search does before it says no: which last resort, at what price, and what forbids it."""

from __future__ import annotations

import dataclasses
import re
from html import unescape
from typing import Any

import pytest

from kit.cost.hardware import usable_gib
from kit.cost.memory.peak import peak_gib
from kit.errors import PlanError
from kit.planner.fallbacks import FALLBACKS, Fallback
from kit.planner.make_plan import make_plan
from kit.planner.plan import Decision, Plan
from kit.planner.request import Request
from kit.planner.search import EQUALLY_FAST, can_fit, search
from kit.report.clusters import cluster_table, compare_clusters
from kit.report.html import page
from kit.report.memory_report import memory_report
from kit.report.plan_text import render
from kit.report.summary import summary
from kit.report.view import view_of
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from kit.units import human_seconds
from tests.planning.questions import planned
from tests.support.refusals import refusal

(HOST, INPUTS), (MOMENTS,), (STATE,) = FALLBACKS
VERL_GIB = 1.6e12 / 2**30
"""Host memory of verl's nodes (docs/perf/dpsk.md)."""


def h20(nodes: int, host_ram_gib: float | None = VERL_GIB) -> ClusterSpec:
    return dataclasses.replace(parse_cluster(f"{nodes}x8xH20"), host_ram_gib=host_ram_gib)


def said(plan: Plan) -> Decision:
    (decision,) = (decision for decision in plan.decisions if decision.rule == "last_resort")
    return decision


def flat(text: str) -> str:
    return " ".join(text.split())


# ---------------------------------------------------------------- Megatron's optimizer on the host


@pytest.mark.slow
def test_deepseek_v3_on_96_h20_and_qwen3_235b_on_32_are_found() -> None:
    """The layouts of verl's table, with the optimizer on the host."""
    deepseek, qwen = planned("deepseek-v3", h20(12)), planned("qwen3-235b-a22b", h20(4))
    for plan, gib in ((deepseek, 78.6), (qwen, 72.15)):
        assert (plan.layout.engine, plan.layout.offload_optimizer, said(plan).chosen) == ("megatron", "cpu", HOST.what)
        assert plan.predicted.peak_gib == pytest.approx(gib, abs=0.05)
    assert planned("qwen3-235b-a22b", h20(4), Pins(engine="megatron")).layout == qwen.layout
    # DeepSpeed's own offload fits too, and takes longer.
    slower = planned("qwen3-235b-a22b", h20(4), Pins(engine="deepspeed"))
    assert slower.predicted.step_time_s > EQUALLY_FAST * qwen.predicted.step_time_s
    assert f"the fastest other layout takes {human_seconds(slower.predicted.step_time_s)} (" in said(qwen).why
    assert said(qwen).why.endswith("layout.offload_optimizer=none forbids it")


def test_the_smallest_share_that_fits_goes_to_the_host() -> None:
    cluster = parse_cluster("p4d.24xlarge:8")
    pins = Pins(engine="megatron", tp=8, pp=2, vp=2, cp=1, recompute="full", micro_batch_size=1)
    plan = planned("llama-3-70b", cluster, pins)
    assert plan.layout.optimizer_offload_fraction == 0.75
    shares = [
        plan.workload.with_layout(plan.layout.but(optimizer_offload_fraction=share)) for share in (0.5, 0.75, 1.0)
    ]
    less, own, more = map(peak_gib, shares)
    assert more < own <= usable_gib(cluster.gpu) < less
    fixed = dataclasses.replace(pins, offload_optimizer="cpu", optimizer_offload_fraction=1.0)
    assert planned("llama-3-70b", cluster, fixed).predicted.step_time_s > plan.predicted.step_time_s
    # A pinned share is kept, though a smaller one would fit, and refused where it does not fit.
    assert planned("llama-3-70b", cluster, pins.but(optimizer_offload_fraction=0.8)).layout.offload_optimizer == "cpu"
    assert "optimizer_offload_fraction left to the planner instead of 0.5" in refusal(
        PlanError, planned, "llama-3-70b", cluster, pins.but(offload_optimizer="cpu", optimizer_offload_fraction=0.5)
    )


def test_a_node_with_too_little_memory_for_all_of_it_takes_a_share() -> None:
    """The host's memory for the whole optimizer is not there; for three quarters it is."""
    pins = Pins(engine="megatron", tp=8, pp=2, vp=2, cp=1, recompute="full", micro_batch_size=1)
    whole = planned("llama-3-70b", parse_cluster("p4d.24xlarge:8"), pins.but(offload_optimizer="cpu"))
    host = 0.95 * whole.predicted.host_ram_gib_per_node / 0.9
    small = dataclasses.replace(parse_cluster("p4d.24xlarge:8"), host_ram_gib=host)
    assert planned("llama-3-70b", small, pins.but(offload_optimizer="cpu")).layout.optimizer_offload_fraction == 0.75
    tiny = dataclasses.replace(small, host_ram_gib=host / 2)
    assert search(Request(model=load_model("llama-3-70b"), cluster=tiny, job=JobSpec(), pins=pins)).fallback != HOST


# ---------------------------------------------------------------- the order, and what forbids


def small(host_ram_gib: float, pins: Pins | None = None) -> Request:
    """A small model on a card and a machine with little memory."""
    cluster = dataclasses.replace(parse_cluster("1xRTX-4090"), host_ram_gib=host_ram_gib)
    job = JobSpec(global_batch_size=4)
    return Request(model=load_model("qwen2.5-1.5b"), cluster=cluster, job=job, pins=pins or Pins())


@pytest.mark.parametrize(
    ("fallback", "host_ram_gib", "forbidden"),
    [
        (HOST, 16.0, {}),
        (MOMENTS, 4.0, {}),
        (STATE, 4.0, {"implementation": "huggingface"}),
        (None, 4.0, {"optimizer_state_dtype": "fp32"}),
    ],
    ids=["host", "moments", "state", "none"],
)
def test_time_is_paid_before_accuracy_and_moments_before_master_weights(
    fallback: Fallback | None, host_ram_gib: float, forbidden: dict[str, Any]
) -> None:
    """Moments and master weights in bf16 fit in all cases; less host memory or a pin takes the cheaper away."""
    pinned = small(host_ram_gib, Pins(**forbidden))
    assert all(can_fit(added) for each in (MOMENTS, STATE) if (added := each.added_to(small(host_ram_gib))))
    found = search(pinned)
    assert found.fallback is fallback
    assert can_fit(pinned) == (found.best is not None)
    assert not can_fit(pinned, fallbacks=False)


def test_a_refusal_names_the_pins_that_forbid_what_would_fit() -> None:
    for gib, pins, free in (
        (16.0, Pins(engine="megatron", offload_optimizer="none", optimizer_state_dtype="fp32"), "offload_optimizer"),
        (4.0, Pins(engine="deepspeed", optimizer_state_dtype="fp32"), "optimizer_state_dtype"),
    ):
        asked = small(gib, pins)
        assert re.search(
            rf"it fits with layout\.{free} left to the planner instead of",
            refusal(PlanError, make_plan, asked.model, asked.cluster, asked.job, pins),
        )


# ---------------------------------------------------------------- what is said


def lossy() -> Plan:
    """7B on one card: 12 bytes of its state a parameter, and 16 do not fit the machine."""
    return planned("llama-2-7b", parse_cluster("1xRTX-4090"))


def test_a_dense_model_that_fits_only_with_bf16_state_and_what_that_costs() -> None:
    plan = lossy()
    assert (plan.layout.engine, plan.layout.optimizer_state_dtype) == ("deepspeed", "bf16")
    decision = said(plan)
    assert decision.chosen == STATE.what
    assert [
        words for words in (
            "no other layout that kit tries fits", "Accuracy", "6.033 instead of 6.018", "6.825 instead of 6.786",
            "layout.optimizer_state_dtype=fp32 forbids it",
            "it is not needed with --lora (or job.lora.four_bit=false): adapters",
            "or cluster.host_ram_gib=168 instead of 128, for offload",
        ) if words not in decision.why
    ] == []  # fmt: skip
    assert [
        f"last_resort={decision.chosen}: {decision.why}" in flat(shown)
        for shown in (
            summary(view_of(plan)),
            render(view_of(plan)),
            re.sub("<[^>]*>", "", unescape(page(view_of(plan)))),
        )
    ] == [True] * 3
    report = memory_report(Request(model=plan.model, cluster=plan.cluster, job=plan.job))
    assert report.reasons[0] == f"{decision.chosen}: {decision.why}"
    assert report.peak_gib == pytest.approx(plan.predicted.peak_gib)


def test_what_is_said_to_make_it_needless_does() -> None:
    plan = lossy()
    again = make_plan(plan.model, dataclasses.replace(plan.cluster, host_ram_gib=168.0), plan.job)
    assert again.layout.optimizer_state_dtype == "fp32"
    assert "last_resort" not in {decision.rule for decision in again.decisions}
    assert "does not fit" in refusal(
        PlanError, make_plan, plan.model, plan.cluster, plan.job, Pins(optimizer_state_dtype="fp32")
    )


def test_an_optimizer_in_8_bits_is_proposed_and_not_chosen() -> None:
    assert "it fits with job.optimizer.name=adamw-8bit instead of adamw" in refusal(
        PlanError,
        planned,
        "llama-2-13b",
        dataclasses.replace(parse_cluster("4xA100-40"), host_ram_gib=64.0, nvme_gib=None),
    )


# ---------------------------------------------------------------- comparisons


def test_clusters_are_compared_without_loss_of_accuracy() -> None:
    clusters = {name: parse_cluster(name) for name in ("1xRTX-4090", "8xA100-40")}
    asked = Request(model=load_model("llama-2-7b"), cluster=clusters["8xA100-40"], job=JobSpec())
    card, node = compare_clusters(asked, clusters)
    assert (node.layout is None, card.layout is None) == (False, True)
    assert "with loss of accuracy it does (kit plan), which is not compared" in flat(cluster_table([card, node]))
    # A pin is what the user wants: then it is compared.
    pinned = dataclasses.replace(asked, pins=Pins(optimizer_state_dtype="bf16"))
    assert compare_clusters(pinned, clusters)[0].layout is not None
