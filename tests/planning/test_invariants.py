"""What must hold of every answer of the planner, on random questions. ``KIT_INVARIANTS=3000`` asks more of them
(make prove NAME=invariants)."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kit.cost.memory.peak import peak_gib
from kit.diagnose.lint import lint
from kit.emit.accelerate import accelerate_config
from kit.emit.accelerate import applies as by_accelerate
from kit.emit.deepspeed import ds_config
from kit.errors import PlanError
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.planner.search import can_fit, search, step_s
from kit.specs import strict_yaml
from kit.specs.layout import PINNABLE, Pins
from tests.planning.random_cases import random_request, with_more_memory

CASES = int(os.environ.get("KIT_INVARIANTS", "40"))
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


def test_enough_of_the_questions_have_a_plan() -> None:
    found = [plan for _, plan in plans()]
    assert len(found) > CASES / 4
    assert {plan.layout.engine for plan in found} >= {"torch", "megatron"}


def test_components_add_up_to_the_peak_and_to_the_step() -> None:
    for request, plan in plans():
        fullest = max(sum(stage.components_gib.values()) for stage in plan.predicted.memory)
        assert fullest == pytest.approx(plan.predicted.peak_gib), asked(request)
        assert fullest == pytest.approx(peak_gib(plan.workload)), asked(request)
        moments = max(max(stage.phases_gib.values()) for stage in plan.predicted.memory)
        assert fullest == pytest.approx(moments), asked(request)
        assert sum(plan.predicted.step_time_components_s.values()) == pytest.approx(plan.predicted.step_time_s)


def test_a_plan_pinned_to_its_own_layout_is_the_same_plan() -> None:
    for request, plan in plans():
        pins = Pins(**{name: getattr(plan.layout, name) for name in PINNABLE})
        again = make_plan(request.model, request.cluster, request.job, pins)
        assert again.layout == plan.layout, asked(request)
        assert again.predicted == plan.predicted, asked(request)


def test_no_mfu_above_what_the_precision_allows() -> None:
    assert [asked(request) for request, plan in plans() if not 0 < plan.predicted.mfu <= 1] == []


def test_more_memory_still_has_a_plan() -> None:
    assert [asked(request) for request, _ in plans() if not can_fit(with_more_memory(request))] == []


def test_more_memory_is_never_slower_by_over_a_hundredth() -> None:
    for request, plan in plans():
        richer = search(with_more_memory(request)).best
        assert richer is not None, asked(request)
        assert step_s(richer) <= 1.01 * plan.predicted.step_time_s, asked(request)


def test_whether_something_fits_is_said_as_the_search_says_it() -> None:
    for request, plan, _ in answers()[:15]:
        assert can_fit(request) == (search(request).best is not None) == (plan is not None), asked(request)


def test_no_answer_takes_more_than_three_seconds() -> None:
    """Refusals too, which look for what would help."""
    slow = {asked(request): seconds for request, _, seconds in answers() if seconds > LONGEST_S}
    assert slow == {}


def test_emitted_files_lint_without_errors(tmp_path: Path) -> None:
    linted = 0
    for number, (request, plan) in enumerate(plans()):
        files = {}
        if plan.layout.engine == "deepspeed":
            files["ds_config.json"] = json.dumps(_with_disk(ds_config(plan), tmp_path))
        if by_accelerate(plan):
            files["accelerate.yaml"] = strict_yaml.dump(accelerate_config(plan))
        (directory := tmp_path / str(number)).mkdir()
        for name, text in files.items():
            (directory / name).write_text(text)
            found = lint(directory / name)
            assert [str(finding) for finding in found if finding.severity == "error"] == [], asked(request)
            linted += 1
    assert linted > CASES / 10


def _with_disk(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Fills in the path that a run names (``run.nvme_path``), because a plan does not know it."""
    for section in config["zero_optimization"].values():
        if isinstance(section, dict) and section.get("device") == "nvme":
            section["nvme_path"] = str(path)
    return config


if __name__ == "__main__":
    os.environ.setdefault("KIT_INVARIANTS", "1000")
    raise SystemExit(pytest.main(["-q", __file__]))
