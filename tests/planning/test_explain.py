"""What binds, the schedule, what-ifs, clusters to get, and residuals of real runs."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from kit.errors import PlanError, SpecError
from kit.planner.cluster_selection import Constraints, cluster_options, render_options
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.report.pipeline_schedule import BACKWARD, simulate
from kit.report.what_if import explain, pinned, what_if
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.layout import Pins
from tests.support.models import job
from tests.support.refusals import refusal


def plan_70b(pins: Pins | None = None) -> Plan:
    return make_plan(load_model("llama-3-70b"), parse_cluster("64xA100-80"), job(), pins)


@pytest.mark.parametrize(("pp", "vp", "m"), [(1, 1, 3), (4, 1, 8), (4, 1, 2), (4, 2, 8), (2, 3, 4), (8, 1, 16)])
def test_the_simulated_schedule_takes_what_the_bubble_formula_says(pp: int, vp: int, m: int) -> None:
    passes = simulate(pp, vp, m)
    assert len(passes) == 2 * pp * vp * m
    each = 1 + BACKWARD
    ideal = m * vp * each
    end = max(entry.end for entry in passes)
    if m >= pp:
        assert end == ideal + (pp - 1) * each  # (p−1)/(v·m) of the ideal time
    else:
        assert end >= ideal + (pp - 1) * each
    for stage in range(pp):
        own = sorted((entry for entry in passes if entry.stage == stage), key=lambda entry: entry.start)
        assert all(a.end <= b.start for a, b in pairwise(own))  # one at a time


@pytest.mark.slow
def test_explain_says_what_would_change(tmp_path: Path) -> None:
    pins = Pins(engine="megatron", tp=8, pp=2)
    plan = plan_70b(pins)
    assert pinned(plan) == pins
    explained = explain(plan, changes=("cluster=64xH100", "job.seq_length=8192", "layout.tp=3", "cluster=8xH200"))
    h100, longer, illegal, few = explained.what_if
    assert (explained.unpinned and explained.unpinned.layout) == plan_70b().layout
    assert "\n\nleft to the planner: megatron" in str(explained)
    assert h100.plan == make_plan(plan.model, parse_cluster("64xH100"), plan.job, pins)
    longer_job = longer.plan and (longer.plan.job.seq_length, longer.plan.job.total_tokens)
    assert longer_job == (8192, plan.job.total_tokens)
    assert (illegal.plan, "tp=3" in illegal.note) == (None, True)
    assert few.note == "pins left to the planner (with them there is no plan)"  # 32 GPUs of 8
    (unpinned,) = explain(plan, Pins(), ("cluster=64xH100",)).what_if
    assert unpinned.plan == make_plan(plan.model, parse_cluster("64xH100"), plan.job)
    free = explain(plan_70b(), Pins(), ("layout.tp=8", "cluster=1xT4", "job.epochs=3"))
    assert free.unpinned is None
    pinned_to_8, nothing, epochs = free.what_if
    assert pinned_to_8.plan.layout.tp == 8
    assert (nothing.plan, "bf16" in nothing.note) == (None, True)
    assert (epochs.plan.job.epochs, epochs.plan.job.total_tokens) == (3.0, None)
    assert "the same layout would be chosen" in str(explain(plan_70b(), Pins(engine="megatron")))


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


def test_clusters_by_deadline_and_money() -> None:
    model, the_job = load_model("llama-3-8b"), job(total_tokens=10**12, global_batch_size=512)
    pins = Pins(engine="megatron")
    found = cluster_options(model, the_job, pins, Constraints(deadline_days=40), "p5.48xlarge")
    fewer = make_plan(model, parse_cluster(f"p5.48xlarge:{found[0].cluster.num_nodes // 2}"), the_job, pins).predicted
    assert found[0].days <= 40 < (fewer.total_days or 0)  # half of the nodes would be late
    assert "p5.48xlarge" in render_options(found)
    for wish, node, said in (
        (Constraints(budget_usd=10.0, max_gpus=16), "p5.48xlarge", "above the budget"),
        # A sum that no type could do with at the highest MFU is refused before anything is searched.
        (Constraints(budget_usd=10.0), None, "at 65% MFU already, above the budget"),
        (Constraints(deadline_days=1), "p9.huge", "is not in the catalog"),
    ):
        assert re.search(said, refusal((PlanError, SpecError), cluster_options, model, the_job, pins, wish, node))


@pytest.mark.slow
def test_what_is_not_searched_could_not_have_come_first() -> None:
    model, the_job, pins = load_model("llama-3-8b"), job(total_tokens=10**10), Pins(engine="torch")
    for goal in ("gpus", "money", "time"):
        constraints = Constraints(goal=goal, deadline_days=20, max_gpus=16)  # type: ignore[arg-type]
        first = cluster_options(model, the_job, pins, constraints)[0]
        for node in ("p5.48xlarge", "p4de.24xlarge"):
            (alone,) = cluster_options(model, the_job, pins, constraints, node)
            measure = {"gpus": "num_gpus", "money": "cost_usd", "time": "days"}[goal]
            ours, theirs = (getattr(each.cluster if goal == "gpus" else each, measure) for each in (first, alone))
            assert ours <= theirs


def test_a_band_is_of_the_code_that_runs() -> None:
    """On Ampere others have run torch's kernels under Megatron's split."""
    native, like, zero = (
        make_plan(load_model("llama-3-70b"), parse_cluster(gpus), job(), pins).predicted
        for gpus, pins in (
            ("64xH100", Pins(engine="megatron")), ("64xA100-80", Pins(engine="megatron")),
            ("64xA100-80", Pins(engine="deepspeed", implementation="huggingface")),
        )
    )  # fmt: skip
    assert native.step_time_band is None
    assert "no published run of Megatron's local layers" in native.step_time_evidence
    assert "runs of similar code" in like.step_time_evidence
    assert 0 < (zero.step_time_band or 0) < 0.5 > (like.step_time_band or 0) > 0
