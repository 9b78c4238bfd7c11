"""Data read before it is asked for is the data that would have been read."""

from __future__ import annotations

import threading
from contextlib import closing

import numpy as np
import pytest
import torch

from kit.errors import DataError
from kit.planner.schedule import batch_size
from kit.specs.run import BatchRampSpec, CheckpointSpec, ScheduleSpec, StabilitySpec
from kit.training import loop
from kit.training.data.fine_tuning_rows import Row
from kit.training.data.loader import DataLoader, Prefetcher, pin
from kit.training.data.samples import packed
from tests.support import tiny
from tests.support.calls import before
from tests.support.refusals import refusal
from tests.training import runs


class Steps:
    """A feed that notes who reads what."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int, str]] = []

    def step(self, position: int, batch_size: int) -> list[str]:
        self.read.append((position, batch_size, threading.current_thread().name))
        if position == 99:
            raise DataError("sample 99 is damaged")
        return [f"{position}+{batch_size}"]


def test_what_was_expected_is_not_read_twice():
    with closing(Prefetcher(feed := Steps(), wanted=True)) as ahead:  # type: ignore[arg-type]
        ahead.expect(4, 2)
        assert ahead.step(4, 2) == ["4+2"]
        ahead.expect(6, 2)
        assert ahead.step(4, 2) == ["4+2"]  # rewound
        ahead.expect(6, 2)
        assert ahead.step(6, 4) == ["6+4"]  # of another size
    wanted = [read for read in feed.read if read[:2] != (6, 2)]
    assert [read[:2] for read in wanted] == [(4, 2), (4, 2), (6, 4)]
    assert [name.startswith("kit-data") for *_, name in wanted] == [True, False, False]


def test_what_reading_ahead_met_is_raised_when_it_is_asked_for():
    with closing(Prefetcher(Steps(), wanted=True)) as ahead:  # type: ignore[arg-type]
        ahead.expect(99, 2)
        assert "damaged" in refusal(DataError, ahead.step, 99, 2)


def test_all_but_what_the_host_reads_is_page_locked(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1000)
    row = Row(inputs=np.arange(3), labels=np.arange(3))
    batch = packed([[row, row]], 8)
    pinned = pin(batch)
    assert all(
        torch.equal(getattr(pinned, name), getattr(batch, name) + 1000)
        for name in ("input_ids", "labels", "position_ids")
    )
    assert torch.equal(pinned.sequence_ids, batch.sequence_ids)
    assert (pinned.padding, pinned.source_ids) == (2, None)


@pytest.mark.usefixtures("one_process")
def test_a_run_that_reads_ahead_is_the_same_run(tmp_path, monkeypatch):
    """With a batch ramp, and a spike after which the run goes back and skips samples."""
    read, found = [], []
    before(
        monkeypatch,
        DataLoader,
        "step",
        lambda _, position, *more: read.append((threading.current_thread().name.split("_")[0], position)),
    )
    for ahead in (False, True):
        read.clear()
        monkeypatch.setattr(loop, "should_prefetch", lambda device, ahead=ahead: ahead)
        monkeypatch.setattr("kit.training.data.loader.pin", lambda batch: batch)  # there is nothing to pin for
        rundir = runs.trained(
            tmp_path / str(ahead),
            tiny.plan(gradient_accumulation_steps=4),
            steps=12,
            schedule=ScheduleSpec(batch_ramp=BatchRampSpec(start=2, increment=2, samples=20)),
            stability=StabilitySpec(window_steps=8, sigmas=0.5, loss_spike="rewind", gradient_spike="off"),
            checkpoint=CheckpointSpec(every_steps=3, keep_last=2),
        )
        found.append(runs.metrics(rundir))
    after = [event["skipped_samples"][1] + 1 for event in runs.events(rundir) if event["event"] == "rewound"]
    assert [position for thread, position in read if thread == "MainThread"] == [0, *after], "all others came ahead"
    assert found[0] == found[1]
    assert len({row["batch_size"] for row in found[0]}) > 1
    # What the run skipped was not seen: it does not make the batch grow.
    assert [row["batch_size"] for row in found[0]] == [
        batch_size(row["samples_seen"] - row["batch_size"], rundir.run.schedule.batch_ramp, 8) for row in found[0]
    ]
