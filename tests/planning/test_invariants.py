"""What must hold of every answer of the planner, on random questions. ``KIT_INVARIANTS=3000`` asks more of them
(make prove NAME=invariants)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from kit.cost.memory.peak import peak_gib
from kit.errors import PlanError
from kit.planner.fallbacks import FALLBACKS
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.planner.search import LayoutScorer, can_fit, search, step_s
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec
from kit.specs.layout import PINNABLE, ZERO_KEYS, Pins, describe
from kit.units import human_seconds
from tests.planning.random_cases import random_request, with_more_memory, with_twice_the_nodes
from tests.support.refusals import refusal

pytestmark = pytest.mark.xdist_group("invariants")
"""One process of two: its answers are looked for once."""
CASES = int(os.environ.get("KIT_INVARIANTS", "16"))
LONGEST_S = 3.0
"""Processor time of an answer."""


@cache
def answers() -> tuple[tuple[Request, Plan | None, float], ...]:
    """(question, plan or null, seconds of the processor)."""
    return tuple(answer(random_request(seed)) for seed in range(CASES))


def answer(request: Request) -> tuple[Request, Plan | None, float]:
    begin, plan = time.process_time(), None
    with contextlib.suppress(PlanError):
        plan = make_plan(request.model, request.cluster, request.job)
    return request, plan, time.process_time() - begin


def plans() -> Iterator[tuple[Request, Plan]]:
    return ((request, plan) for request, plan, _ in answers() if plan is not None)


def asked(request: Request) -> str:
    job = request.job
    return (
        f"{request.model.name} on {request.cluster.num_gpus} x {request.cluster.gpu.name}, {job.seq_length} tokens, "
        f"{job.global_batch_size} a step, {job.precision}, LoRA {job.lora}"
    )


@pytest.mark.slow
def test_components_add_up_to_the_peak_and_to_the_step() -> None:
    assert len([*plans()]) > CASES / 4
    for request, plan in plans():
        fullest = max(sum(stage.components_gib.values()) for stage in plan.predicted.memory)
        assert fullest == pytest.approx(plan.predicted.peak_gib), asked(request)
        assert fullest == pytest.approx(peak_gib(plan.workload)), asked(request)
        moments = max(max(stage.phases_gib.values()) for stage in plan.predicted.memory)
        assert fullest == pytest.approx(moments), asked(request)
        assert sum(plan.predicted.step_time_components_s.values()) == pytest.approx(plan.predicted.step_time_s)


@pytest.mark.slow
def test_a_plan_pinned_to_its_own_layout_is_the_same_plan() -> None:
    for request, plan in plans():
        pins = Pins(**{name: getattr(plan.layout, name) for name in PINNABLE})
        again = make_plan(request.model, request.cluster, request.job, pins)
        assert (again.layout, again.predicted) == (plan.layout, plan.predicted), asked(request)


@pytest.mark.slow
def test_no_mfu_above_what_the_precision_allows() -> None:
    assert [asked(request) for request, plan in plans() if not 0 < plan.predicted.mfu <= 1] == []


@pytest.mark.slow
def test_more_memory_is_never_slower_by_over_a_hundredth_nor_needs_a_dearer_last_resort() -> None:
    """A last resort that more memory makes needless may have been the faster one: it had another price."""
    for request, plan in plans():
        richer = search(with_more_memory(request))
        assert richer.best is not None, asked(request)
        own = price([decision.chosen for decision in plan.decisions if decision.rule == "last_resort"])
        less = price([richer.fallback.what] if richer.fallback else [])
        assert less <= own, asked(request)
        assert less < own or step_s(richer.best) <= 1.01 * plan.predicted.step_time_s, asked(request)


def price(fallback: list[str]) -> int:
    """The place of a last resort's group; 0 without one."""
    groups = [[each.what for each in group] for group in FALLBACKS]
    return next((1 + index for index, group in enumerate(groups) if set(group) & set(fallback)), 0)


@pytest.mark.nightly
def test_no_layout_that_the_bound_leaves_out_would_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same search without the bound of step time; and no layout is faster than its bound."""
    bound = LayoutScorer.least_s
    monkeypatch.setattr(LayoutScorer, "least_s", lambda *_: 0.0)
    for request, plan in plans():
        balanced = Request(model=request.model, cluster=request.cluster, job=request.job)
        found = search(balanced)
        assert found.best.layout == plan.layout.but(**dict.fromkeys(ZERO_KEYS)), asked(request)
        scorer = LayoutScorer(balanced)
        for each in (one for one in found.considered[::7] if one.step_time_s is not None):
            assert 0 < bound(scorer, balanced.workload(each.layout)) <= each.step_time_s, describe(each.layout)


@pytest.mark.slow
def test_twice_the_nodes_are_faster_or_the_answer_says_that_fewer_are() -> None:
    for request, plan in plans():
        doubled, larger, refused = with_twice_the_nodes(request), None, ""
        try:
            larger = make_plan(doubled.model, doubled.cluster, doubled.job)
        except PlanError as error:
            refused = str(error)
        if larger is None:
            said = (f"with {request.cluster.num_gpus} GPUs it takes ", "with job.global_batch_size=")
            assert [part for part in said if part not in refused] == [], asked(doubled)
        elif larger.predicted.step_time_s > plan.predicted.step_time_s:
            assert "num_gpus" in {decision.rule for decision in larger.decisions}, asked(doubled)


def test_a_batch_that_does_not_divide_is_refused_with_what_does_and_its_step() -> None:
    model, cluster = load_model("opt-2.7b"), parse_cluster("16xA100-80")
    job = JobSpec(seq_length=2048, global_batch_size=24)
    refused = refusal(PlanError, make_plan, model, cluster, job)
    for batch, gpus in ((16, 16), (32, 16), (24, 8)):
        other = replace(job, global_batch_size=batch)
        step_s = make_plan(model, replace(cluster, num_nodes=gpus // 8), other).predicted.step_time_s
        changed = f"job.global_batch_size={batch}" if gpus == 16 else f"{gpus} GPUs"
        assert f"with {changed} it takes {human_seconds(step_s)} a step" in refused


@pytest.mark.slow
def test_whether_something_fits_is_said_as_the_search_says_it() -> None:
    assert [asked(request) for request, plan, _ in answers()[:8] if can_fit(request) != (plan is not None)] == []


@pytest.mark.slow
def test_no_answer_takes_more_than_three_seconds() -> None:
    """Refusals too, which look for what would help."""
    assert {asked(request): seconds for request, _, seconds in answers() if seconds > LONGEST_S} == {}


if __name__ == "__main__":
    os.environ.setdefault("KIT_INVARIANTS", "1000")
    raise SystemExit(pytest.main(["-q", __file__, str(Path(__file__).with_name("test_search.py"))]))
