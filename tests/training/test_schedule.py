"""The learning rate as a function of the samples seen."""

from __future__ import annotations

import math

import pytest

from kit.specs.run import ScheduleSpec
from kit.training.schedule import learning_rate


def rate(step, *, schedule, steps=1000, batch=4, peak=3e-4):
    return learning_rate(step * batch, peak=peak, schedule=schedule, total_steps=steps, global_batch_size=batch)


def test_warm_up_is_linear_and_its_first_step_trains():
    schedule = ScheduleSpec(warmup_steps=100)
    assert rate(1, schedule=schedule) == pytest.approx(3e-6)
    assert rate(50, schedule=schedule) == pytest.approx(1.5e-4)
    assert rate(100, schedule=schedule) == pytest.approx(3e-4)


def test_cosine_ends_on_the_minimum():
    schedule = ScheduleSpec(warmup_steps=100, min_ratio=0.1)
    assert rate(550, schedule=schedule) == pytest.approx(3e-4 * 0.55)
    assert rate(325, schedule=schedule) == pytest.approx(3e-4 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))
    assert rate(1000, schedule=schedule) == pytest.approx(3e-5)
    assert rate(2000, schedule=schedule) == pytest.approx(3e-5)


def test_constant():
    schedule = ScheduleSpec(kind="constant", warmup_steps=10)
    assert [rate(step, schedule=schedule) for step in (10, 500, 1000)] == [3e-4] * 3


@pytest.mark.parametrize(("steps", "warmup"), [(1000, 100), (999, 99.9), (60, 6), (20_000, 2000)])
def test_a_short_run_warms_up_for_a_tenth_of_itself(steps, warmup):
    schedule = ScheduleSpec(kind="constant", warmup_steps=2000)
    assert rate(1, schedule=schedule, steps=steps) == pytest.approx(3e-4 / warmup)
    assert rate(math.ceil(warmup), schedule=schedule, steps=steps) == 3e-4


def test_no_warm_up():
    assert rate(1, schedule=ScheduleSpec(kind="constant", warmup_steps=0)) == 3e-4


def test_only_samples_matter_not_how_steps_group_them():
    schedule = ScheduleSpec(warmup_steps=100)
    small = learning_rate(512, peak=1.0, schedule=schedule, total_steps=1000, global_batch_size=4)
    large = learning_rate(512, peak=1.0, schedule=ScheduleSpec(warmup_steps=50), total_steps=500, global_batch_size=8)
    assert small == large
