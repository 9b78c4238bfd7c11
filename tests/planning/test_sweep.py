"""A sweep alone: its order, the errors that it keeps, what it does not ask any more, and plans that never end."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from kit.cost.memory.peak import MemoryReport, peak
from kit.errors import PlanError, SpecError
from kit.planner import make_plan as module
from kit.planner.calibration import Calibration, Residual
from kit.planner.make_plan import NO_TIME, fastest_plan, plan_that_ends
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.planner.sweep import Outcome, Variant, sweep
from kit.report import largest_model
from kit.report.clusters import compare_clusters
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from tests.support.refusals import refusal

BASE = Request(model=load_model("llama-3.2-1b"), cluster=parse_cluster("8xH100"), job=JobSpec())


def batches(*sizes: int) -> list[Variant]:
    return [Variant(f"batch {size}", replace(BASE, job=JobSpec(global_batch_size=size))) for size in sizes]


def number(asked: Request, seen: list[int]) -> int | None:
    """Refuses a batch of 3, finds nothing for one of 5."""
    size = asked.job.global_batch_size
    seen.append(size)
    if size == 3:
        raise PlanError("3 is refused\nwith a second line")
    return None if size == 5 else 10 * size


def test_each_variant_has_its_own_outcome_in_their_order() -> None:
    """Another error than that of a plan is none."""
    seen: list[int] = []
    variants = batches(4, 3, 5, 1)
    refused = Outcome(variants[1], None, "3 is refused\nwith a second line")
    outcomes = [Outcome(variants[0], 40), refused, Outcome(variants[2], None), Outcome(variants[3], 10)]
    assert list(sweep(variants, lambda each: number(each.request, seen))) == outcomes
    assert seen == [4, 3, 5, 1]
    refusal(SpecError, list, sweep(variants, Mock(side_effect=SpecError("a value that is not one"))))


def test_nothing_is_asked_before_it_is_read() -> None:
    seen: list[int] = []
    outcomes = sweep(iter(batches(4, 2, 1)), lambda each: number(each.request, seen))
    assert (seen, next(outcomes).found, seen) == ([4], 40, [4])
    assert next(outcomes).variant.label == "batch 2"
    assert seen == [4, 2]


def test_a_larger_model_is_not_asked_after_one_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = peak(BASE.workload(fastest_plan(BASE).layout))
    seen: list[tuple[str, bool]] = []

    def fits(each: Variant) -> MemoryReport | None:
        seen.append((each.label, each.request.job.lora is None))
        return None if seen[-1] == (largest_model.SIZES[1], True) else memory

    monkeypatch.setattr(largest_model, "_memory", fits)
    found = largest_model.largest_models(BASE.cluster, BASE.job, Pins())
    assert [name for name, full in seen if full] == [*largest_model.SIZES[:2]]
    assert {each.way: each.model for each in found} == {
        "full": largest_model.SIZES[0], "LoRA": largest_model.SIZES[-1], "QLoRA": largest_model.SIZES[-1]
    }  # fmt: skip


def test_a_plan_that_never_ends_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fastest_plan(replace(BASE, job=JobSpec(total_tokens=10**9)))
    assert plan_that_ends(replace(BASE, job=JobSpec(total_tokens=10**9))) == plan
    # Of an unknown length: an answer.
    assert plan_that_ends(replace(BASE, job=JobSpec(objective="sft", epochs=1.0))).predicted.total_days is None

    def failing(_: Request) -> Plan:
        predicted = replace(plan.predicted, operation=replace(plan.predicted.operation, goodput=0.0))
        return replace(plan, predicted=predicted)

    monkeypatch.setattr(module, "fastest_plan", failing)
    (never,) = sweep([Variant("never", BASE)], lambda each: plan_that_ends(each.request))
    assert (never.found, never.why_none) == (None, NO_TIME)
    (row,) = compare_clusters(BASE, {"eight": BASE.cluster})  # a loss of accuracy would not help
    assert (row.cluster, row.layout, row.days, row.why_none) == ("eight", None, None, NO_TIME)


def test_a_plan_is_of_all_that_the_request_says() -> None:
    """Pins and calibration too."""
    known = Calibration({"dgx-h100 H100, torch huggingface, bf16, dense": Residual(2.0, 0.0, 1)})
    asked = replace(BASE, pins=Pins(engine="torch", zero_stage=2, micro_batch_size=1))
    free, slower = fastest_plan(asked), fastest_plan(replace(asked, calibration=known))
    assert (free.layout.engine, free.layout.zero_stage, free.layout.micro_batch_size) == ("torch", 2, 1)
    assert slower.predicted.step_time_s == pytest.approx(2 * free.predicted.step_time_s)
