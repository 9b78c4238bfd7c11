"""The learning rate as a function of the samples seen."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest

from kit.emit.run_directory import write
from kit.errors import SpecError
from kit.planner.schedule import learning_rate
from kit.specs.run import ScheduleSpec
from tests.support import tiny
from tests.support.refusals import refusal


def rate(step, *, schedule, steps=1000, batch=4, peak=3e-4):
    return learning_rate(step * batch, peak=peak, schedule=schedule, total_steps=steps, global_batch_size=batch)


def kind(name="cosine", warmup_steps=100, **options):
    return ScheduleSpec(kind=name, warmup_steps=warmup_steps, **options)


@pytest.mark.parametrize(
    ("schedule", "step", "part"),
    [
        (kind(), 1, 0.01),  # the first step trains
        (kind(), 50, 0.5),
        (kind(), 100, 1.0),
        (kind(), 550, 0.55),
        (kind(), 325, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2),
        (kind(), 1000, 0.1),
        (kind(), 2000, 0.1),
        (kind("constant"), 1000, 1.0),
        (kind("constant", 0), 1, 1.0),
        (kind("warmup_stable_decay", decay_style="linear", min_ratio=0.0), 900, 1.0),  # the decay is a tenth of the run
        (kind("warmup_stable_decay", decay_style="linear", min_ratio=0.0), 950, 0.5),
        (kind("warmup_stable_decay", decay_style="linear", min_ratio=0.0), 1000, 0.0),
    ],
)
def test_rates(schedule, step, part):
    """Of 1,000 steps, as parts of the peak."""
    assert rate(step, schedule=schedule) == pytest.approx(3e-4 * part)


@pytest.mark.parametrize(("steps", "warmup"), [(1000, 100), (999, 99.9), (60, 6), (20_000, 2000)])
def test_a_short_run_warms_up_for_a_tenth_of_itself(steps, warmup):
    schedule = ScheduleSpec(kind="constant", warmup_steps=2000)
    assert rate(1, schedule=schedule, steps=steps) == pytest.approx(3e-4 / warmup)
    assert rate(math.ceil(warmup), schedule=schedule, steps=steps) == 3e-4


KINDS = [
    ScheduleSpec(kind="cosine", warmup_steps=10),
    ScheduleSpec(kind="linear", warmup_steps=10, min_ratio=0.2),
    ScheduleSpec(kind="inverse_sqrt", warmup_steps=10, min_ratio=0.4),
    ScheduleSpec(kind="constant", warmup_steps=10),
    *(
        ScheduleSpec(kind="warmup_stable_decay", warmup_steps=10, decay_steps=30, decay_style=style)
        for style in ("exponential", "linear", "cosine", "minus_sqrt")
    ),
]


@pytest.mark.parametrize("schedule", KINDS, ids=lambda each: f"{each.kind}-{each.decay_style}")
def test_rates_are_megatron_cores(schedule):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    styles = {"warmup_stable_decay": "WSD", "inverse_sqrt": "inverse-square-root"}
    optimizer = SimpleNamespace(param_groups=[{}])
    theirs = OptimizerParamScheduler(
        optimizer, 0.0, 3e-4, 3e-4 * schedule.min_ratio, 10 * 4, 100 * 4, styles.get(schedule.kind, schedule.kind),
        0.0, 0.0, 0, "constant", wsd_decay_steps=30 * 4, lr_wsd_decay_style=schedule.decay_style,
    )  # fmt: skip
    for step in range(1, 101):
        theirs.step(4)
        assert rate(step, schedule=schedule, steps=100) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


@pytest.mark.parametrize("num_cycles", [1, 3])
def test_rates_of_restarts_are_those_of_transformers(num_cycles):
    """Which Megatron has not. Transformers sets the rate before a step and kit counts the step itself: their step n is
    kit's step n."""
    import torch
    from transformers import get_scheduler

    schedule = ScheduleSpec(kind="cosine_with_restarts", warmup_steps=10, min_ratio=0.0, num_cycles=num_cycles)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler("cosine_with_restarts", optimizer, 10, 100, {"num_cycles": num_cycles})
    for step in range(1, 101):
        optimizer.step()
        scheduler.step()
        theirs = scheduler.get_last_lr()[0]
        assert rate(step, schedule=schedule, steps=100, peak=1.0) == pytest.approx(theirs, rel=1e-12)


def test_a_decay_that_is_longer_than_the_run_is_refused_before_a_file_is_written(tmp_path):
    schedule = ScheduleSpec(kind="warmup_stable_decay", warmup_steps=0, decay_steps=7)
    assert re.search(
        r"run\.schedule\.decay_steps=7 is more than the 6 steps .* use at most 6",
        refusal(SpecError, write, tiny.plan(), tiny.run_directory_spec(steps=6, schedule=schedule), tmp_path / "run"),
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"kind": "cosine", "decay_steps": 5}, "decay_steps=5 is a key of kind=warmup_stable_decay"),
        ({"kind": "linear", "num_cycles": 2}, "num_cycles=2 is a key of kind=cosine_with_restarts"),
        ({"kind": "inverse_sqrt", "warmup_steps": 0}, "use warmup_steps of 1 or more"),
    ],
)
def test_a_key_of_another_kind_is_refused(keys, words):
    assert re.search(words, refusal(SpecError, lambda: ScheduleSpec(**keys)))
