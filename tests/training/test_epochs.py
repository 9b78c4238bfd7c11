"""Runs that count their data: rows, packs, windows and blends, on any number of ranks, resumed or not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.errors import SpecError
from kit.specs.run import BlendedSetSpec, DataSpec, ScheduleSpec
from kit.training.data.fine_tuning_rows import Row
from kit.training.data.loader import counted
from kit.training.data.samples import packed, padded
from tests.support import tiny
from tests.support.refusals import refusal
from tests.training import runs
from tests.training.pairs import pair

JOB = {"objective": "sft", "total_tokens": None}
UNCOUNTED: dict[str, Any] = {"steps": None, "schedule": ScheduleSpec(warmup_steps=0)}


def rows(prefix: Path, sizes: list[int]) -> Path:
    """Rows of so many tokens, half of them context. The model reads all but the last token of a row."""
    return pair(prefix, ([[1] * (size // 2), [2] * (size - size // 2)] for size in sizes), objective="sft")


def prepared(path: Path, data: DataSpec, job: dict[str, Any], **layout: Any) -> tiny.TinyRunDirectory:
    plan = tiny.plan(job=JOB | job, **({"gradient_accumulation_steps": 2} | layout))
    return tiny.run_directory(path, plan, data=data, **UNCOUNTED)


@pytest.mark.parametrize(
    ("job", "packing", "steps", "said"),
    [
        ({"epochs": 3.0}, False, 8, "8 steps: 3.2 epochs of 10 rows"),  # 30 rows in batches of 4
        ({"epochs": 3.0}, True, 4, "4 steps: 3.2 epochs of 5 packed sequences"),  # two rows of 16 inputs fill 32
        ({"total_tokens": 2 * 170}, False, 5, "5 steps: 2 epochs of 10 rows"),
        ({"total_tokens": 2 * 170}, True, 2, "2 steps: 1.6 epochs of 5 packed sequences"),  # 10 packs hold them
    ],
)
def test_the_run_counts_rows_and_packs(tmp_path, job, packing, steps, said):
    data = DataSpec(train=str(rows(tmp_path / "rows", [17] * 10)), packing=packing)
    for layout in ({}, {"dp": 2, "gradient_accumulation_steps": 1}):  # another world size has the same steps
        found, line = counted(prepared(tmp_path / "run", data, job, **layout))
        assert (found.run.steps, line) == (steps, said)


def test_the_run_counts_text_and_blends(tmp_path):
    text = pair(tmp_path / "text", [[1] * (32 * 9 + 1)])  # nine windows
    job = {"objective": "pretrain", "epochs": 2.0}
    found, line = counted(prepared(tmp_path / "run", DataSpec(train=str(text)), job))
    assert (found.run.steps, line) == (5, "5 steps: 2.22 epochs of 9 windows")
    blend = {
        "short": BlendedSetSpec(path=str(rows(tmp_path / "short", [4] * 30)), weight=3.0),
        "long": BlendedSetSpec(path=str(rows(tmp_path / "long", [16] * 10)), weight=1.0),
    }
    found, _ = counted(prepared(tmp_path / "run", DataSpec(blend=blend), {"total_tokens": 280}))
    assert found.run.steps == 10  # a row has 3/4 · 4 + 1/4 · 16 = 7 tokens: 40 rows


def test_a_run_of_too_many_epochs_ends_before_its_first_step(tmp_path):
    data = DataSpec(train=str(rows(tmp_path / "rows", [17] * 10)))
    rundir = prepared(tmp_path / "run", data, {"total_tokens": 10**11})
    assert re.search(
        r"epochs of 10 samples in .* run\.data\.allow_many_epochs=true", refusal(SpecError, counted, rundir)
    )
    allowed = dataclasses.replace(data, allow_many_epochs=True)
    assert counted(runs.with_run(rundir, data=allowed))[0].run.steps == 10**11 // 68


@pytest.mark.usefixtures("one_process")
def test_a_resumed_run_of_epochs_ends_where_the_whole_one_does(tmp_path):
    data = DataSpec(train=str(rows(tmp_path / "rows", [17, 9] * 5)))
    plan = tiny.plan(job=JOB | {"epochs": 2.0}, gradient_accumulation_steps=2)
    whole, _ = runs.same_curve(tmp_path, plan, (2,), data=data, **UNCOUNTED)
    assert [row["samples_seen"] for row in runs.steps(whole)] == [4, 8, 12, 16, 20]
    assert runs.summary(whole).tokens_seen == 2 * (5 * 16 + 5 * 8)  # two epochs, and no padding
    assert runs.resumed(whole, None).tokens_seen == 2 * (5 * 16 + 5 * 8)  # of a finished run, too


def test_attended_tokens_are_the_squares_of_rows():
    def row(size: int, source: int | None = None) -> Row:
        ids = np.full(size, 1)
        return Row(inputs=ids, labels=ids, source=None if source is None else np.full(source, 1))

    batches = {
        (8, 9 + 25): padded([row(3), row(5)], 32),
        (10, 9 + 25 + 4): packed([[row(3), row(5)], [row(2)]], 32),
        (13, 9 + 25 + 16 + 1): padded([row(3, 4), row(5, 1)], 32),
    }
    assert [(batch.positions - batch.padding, batch.attended) for batch in batches.values()] == [*batches]
