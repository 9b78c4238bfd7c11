"""Every reason of a plan is checked against the comparison that it claims, on random questions."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from kit.planner.describe import describe
from kit.planner.explain.decisions import decisions
from kit.planner.make_plan import request_for
from kit.planner.plan import Decision
from kit.planner.request import Request
from kit.planner.search import (
    EQUALLY_FAST,
    Candidate,
    SearchResult,
    search,
    simplicity,
    step_s,
)
from kit.specs.layout import DEFAULTS, Pins
from tests.planning.random_cases import random_request

PINS = (
    Pins(),
    Pins(),
    Pins(engine="torch"),
    Pins(engine="deepspeed"),
    Pins(engine="megatron"),
    Pins(recompute="full"),
    Pins(recompute="selective"),
    Pins(implementation="transformer_engine"),
    Pins(zero_stage=3),
    Pins(micro_batch_size=1),
)
CASES = (*range(80), 138)
"""138: a choice whose fastest rival splits the work in another way."""


@cache
def answered() -> tuple[tuple[Request, SearchResult, tuple[Decision, ...]], ...]:
    """Random questions that have a plan, some pinned and some of fine-tuning, with the reasons."""
    found = []
    for seed in CASES:
        request, rng = random_request(seed), random.Random(seed)
        request = replace(request, pins=rng.choice(PINS))
        if request.job.objective == "pretrain" and rng.random() < 0.4:
            request = replace(request, job=replace(request.job, objective="sft"))
        request = request_for(request.model, request.cluster, request.job, request.pins)
        if (result := search(request)).best is not None:
            found.append((request, result, decisions(request, result)))
    return tuple(found)


def reasons() -> Iterator[tuple[str, Candidate, list[Candidate], Decision]]:
    """(question, the best, what it was compared with, the reason) of every engine and every choice."""
    for request, result, made in answered():
        best = result.best
        assert best is not None
        fitting = [each for each in result.considered if each.step_time_s is not None]
        asked = (
            f"{request.model.name} on {request.cluster.num_gpus} x {request.cluster.gpu.name}: {describe(best.layout)}"
        )
        for each in made:
            if each.why != "pinned" and each.rule == "engine":
                yield f"{asked}, {each.rule}", best, fitting, each
            elif each.why != "pinned" and each.rule in DEFAULTS and each.rule in vars(best.layout):
                chosen, engine = getattr(best.layout, each.rule), best.layout.engine
                own = [other for other in fitting if other.layout.engine == engine]
                others = [other for other in own if getattr(other.layout, each.rule) != chosen]
                if str(chosen).lower() == each.chosen:
                    yield f"{asked}, {each.rule}", best, others, each


@pytest.mark.nightly
def test_the_fastest_is_the_fastest_and_the_slower_one_is_simpler() -> None:
    seen: Counter[str] = Counter()
    for asked, best, others, decision in reasons():
        why = decision.why
        fastest = min(others, key=step_s, default=None)
        if "no layout that was compared fits with another value" in why:
            assert fastest is None, asked
            seen["alone"] += 1
        elif "the fastest that fits" in why:
            assert fastest is not None, asked
            assert step_s(best) <= step_s(fastest), asked
            seen["fastest"] += 1
        elif found := re.search(r"([\d.]+)% slower than", why):
            assert fastest is not None, asked
            assert float(found[1]) == pytest.approx(100 * (step_s(best) / step_s(fastest) - 1), abs=0.06), asked
            assert step_s(best) <= EQUALLY_FAST * step_s(fastest), asked
            assert simplicity(best.layout) < simplicity(fastest.layout), asked
            seen["simpler"] += 1
    assert min(seen[kind] for kind in ("alone", "fastest", "simpler")) > 5, seen
