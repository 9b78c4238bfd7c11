"""Lengths of runs, batch ramps and learning rates (kit/planner/schedule and length), beside values derived by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from kit.errors import SpecError
from kit.planner import length, schedule
from kit.specs.epoch import Epoch
from kit.specs.run import BatchRampSpec, DataSpec, RunSpec, ScheduleSpec
from tests.planning.questions import PLAN
from tests.planning.shapes import Rows, by_hand
from tests.support.models import job, megatron


def run(ramp: tuple[int, int, int] | None = None, **more: Any) -> RunSpec:
    """A run of rows, whose batch grows from, by, over so many samples."""
    schedule = ScheduleSpec(
        batch_ramp=ramp and BatchRampSpec(start=ramp[0], increment=ramp[1], samples=ramp[2]), warmup_steps=0
    )
    return RunSpec(data=DataSpec(train="rows"), schedule=schedule, **more)


def steps(the_run: RunSpec, epoch: Epoch | None = None, **the_job: Any) -> tuple[int, int]:
    """Of 96 sequences of 1,024 tokens."""
    return length.length(replace(PLAN, job=job(seq_length=1024, global_batch_size=96, **the_job)), the_run, epoch)


def ramped(start: int = 4, increment: int = 4, **layout: int) -> str:
    """Why a ramp to 96 sequences on four data-parallel ranks is refused; empty where it is not."""
    shape = ScheduleSpec(batch_ramp=BatchRampSpec(start=start, increment=increment, samples=192))
    try:
        schedule.check_ramp(
            replace(PLAN, layout=megatron(dp=4, gradient_accumulation_steps=24, **layout)),
            RunSpec(data=DataSpec(train="rows"), schedule=shape),
        )
    except SpecError as refused:
        return str(refused)
    return ""


EPOCH = Epoch(samples=1000, tokens=500_000)
S = ScheduleSpec(kind="linear", warmup_steps=4, min_ratio=0.1)


def rate(seen: int, kind: Any = "linear", **more: Any) -> float:
    """Learning rate over its peak of 2, in a run of 100 steps of 10."""
    shape = replace(S, kind=kind, **{name: more.pop(name) for name in list(more) if name in vars(S)})
    return schedule.learning_rate(seen, peak=2.0, schedule=shape, total_steps=100, global_batch_size=10, **more) / 2


RUNS: Rows = [
    # Steps: run.steps; whole batches of tokens; epochs with a whole last step; ramps of growing batches.
    ("lengths", lambda: [steps(run(steps=7)), steps(run(), total_tokens=96 * 1024 * 3 + 1), steps(run(),
        total_tokens=5), steps(run(), EPOCH, epochs=1.0),
                         steps(run(), EPOCH, epochs=0.1), steps(run(), EPOCH, objective="sft", total_tokens=250_000),
                         steps(run(), EPOCH, epochs=0.096),
                         steps(run(), EPOCH, epochs=0.097)],
     [(7, 672), (3, 288), (1, 96), (11, 1056), (2, 192), (5, 480), (1, 96), (2, 192)]),
    # 32 · 3 samples at 32, then 64: 96 + 128 are at least 192.
    ("lengths of a ramp", lambda: [steps(run((32, 32, 192), steps=2)), steps(run((32, 32, 192), steps=9)),
        steps(run((32, 32, 192)), total_tokens=1024 * 500),
                                   steps(run((32, 32, 192)), total_tokens=1024 * 50), steps(run((32, 32, 192)), EPOCH,
                                   epochs=0.05)],
     [(2, 64), (9, 3 * 32 + 2 * 64 + 4 * 96), (7, 224 + 2 * 96), (1, 32), (2, 64)]),
    ("batches of a ramp", lambda: [[schedule.batch_size(each, BatchRampSpec(start=32, increment=32, samples=192),
        96) for each in (0, 95, 96, 191, 192)],
                                   schedule.batch_size(5, None, 96), list(schedule.ramped(BatchRampSpec(start=32,
                                   increment=32, samples=192), 96))],
     [[32, 32, 64, 64, 96], 96, [32, 32, 32, 64, 64]]),
    ("sizes of a ramp", lambda: [ramped(pp=2), ramped(pp=2, vp=2), ramped(start=97), ramped(increment=40)],
     ["", "run.schedule.batch_ramp.start=4 is not a multiple of micro_batch_size · dp · pp (an interleaved "
          "pipeline) = 8; use 8 or 8",
      "run.schedule.batch_ramp.start=97 is not a multiple of micro_batch_size · dp = 4; use 96 or 100",
      "run.schedule.batch_ramp goes from 4 by 40, which does not meet job.global_batch_size=96; choose an increment "
      "that divides the difference"]),
    # Warm-up over 40 samples; then from 1 to 0.1 over the other 960.
    ("rates", lambda: [rate(each) for each in (10, 39, 40, 520, 1000, 2000)], [0.25, 39 / 40, 1, 0.55, 0.1, 0.1]),
    ("shapes", lambda: [rate(280, each) for each in ("cosine", "constant", "inverse_sqrt")],
     [0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, 1, math.sqrt(40 / 280)]),
    ("a floor of the root", lambda: [rate(1000, "inverse_sqrt"), rate(1000, "inverse_sqrt", min_ratio=0.5)], [0.2,
        0.5]),
    ("stable, then down", lambda: [rate(each, "warmup_stable_decay", decay_steps=20, decay_style=style) for each,
        style in (
        (800, "linear"), (850, "linear"), (950, "exponential"), (950, "minus_sqrt"), (1000, "linear"))],
     [1, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * (2 * 0.5**0.75 - 1), 0.1 + 0.9 * (1 - math.sqrt(0.75)), 0.1]),
    ("a tenth by default", lambda: rate(950, "warmup_stable_decay"), 0.1 + 0.9 * (2 * 0.5**0.5 - 1)),
    ("restarts", lambda: [rate(each, "cosine_with_restarts", num_cycles=2) for each in (40, 280, 520, 1000)], [1, 0.55,
        1, 0.1]),
    ("a tenth of a short run", lambda: schedule.learning_rate(5, peak=2.0, schedule=S, total_steps=10,
        global_batch_size=10), 1.0),
    ("rates over a ramp", lambda: [rate(310, total_samples=600), rate(600, total_samples=600)],
        [0.1 + 0.9 * (600 - 310) / 560, 0.1]),
]  # fmt: skip


test_value = by_hand(RUNS)
