"""What binds, the schedule, what-ifs, clusters to get, and residuals of real runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kit.errors import SpecError
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.report.what_if import explain, pinned, what_if
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.layout import Pins
from tests.support.models import job
from tests.support.refusals import refusal


def plan_70b(pins: Pins | None = None) -> Plan:
    return make_plan(load_model("llama-3-70b"), parse_cluster("64xA100-80"), job(), pins)


@pytest.mark.slow
def test_explain_says_what_would_change() -> None:
    pins = Pins(engine="megatron", tp=8, pp=2)
    plan = plan_70b(pins)
    assert pinned(plan) == pins
    explained = explain(plan, changes=("cluster=64xH100", "job.seq_length=8192", "layout.tp=3", "cluster=8xH200"))
    h100, longer, illegal, few = explained.what_if
    assert (explained.unpinned and explained.unpinned.layout) == plan_70b().layout
    assert "\n\nleft to the planner: megatron" in str(explained)
    assert h100.plan == make_plan(plan.model, parse_cluster("64xH100"), plan.job, pins)
    assert (longer.plan and longer.plan.job) == replace(plan.job, seq_length=8192)
    assert (illegal.plan, "tp=3" in illegal.note) == (None, True)
    assert few.note == "pins left to the planner (with them there is no plan)"  # 32 GPUs of 8


@pytest.mark.slow
def test_without_pins_nothing_is_left_to_the_planner() -> None:
    free = explain(plan_70b(), Pins(), ("layout.tp=8", "cluster=1xT4", "job.epochs=3"))
    pinned_to_8, nothing, epochs = free.what_if
    assert (free.unpinned, pinned_to_8.plan.layout.tp) == (None, 8)
    assert (nothing.plan, "bf16" in nothing.note) == (None, True)
    assert (epochs.plan.job.epochs, epochs.plan.job.total_tokens) == (3.0, None)
    assert "the same layout would be chosen" in str(explain(plan_70b(), Pins(engine="megatron")))
    given = what_if(plan_70b(), "job.grad_clip=0.5", Pins(tp=8, pp=8)).plan
    assert (given.layout.tp, given.layout.pp, given.job.grad_clip) == (8, 8, 0.5)


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ("colour=blue", "layout.tp=4"), ("tp=4", "; write layout.tp=4"), ("seq_length=8", "; write job.seq_length=8"),
        ("gpus=8xH200", "; write cluster=8xH200"), ("cluster.gpus=8", "layout.tp=4"), ("layout.tp", "layout.tp=4"),
        ("tp", "layout.tp=4"), ("job.precision=int4", "--what-if:1: job.precision=int4"),
        ("layout.zero_stage=9", "--what-if:1: layout.zero_stage=9"),
    ],
)  # fmt: skip
def test_a_change_that_is_none_is_refused(change: str, fix: str) -> None:
    refused = refusal(
        SpecError, what_if, make_plan(load_model("gpt2"), parse_cluster("1xH100"), job(seq_length=1024)), change
    )
    assert refused.endswith(fix) or fix.replace("job.", "").replace("layout.", "") in refused


def test_the_next_best_layouts_say_what_separates_them() -> None:
    (decision,) = [entry for entry in plan_70b().decisions if entry.rule == "next"]
    assert 1 <= len(decision.rejected) <= 4
    assert all("% a step" in words and "GiB" in words for words in decision.rejected)
