"""The worker pool itself: what it must surface, and that a pool survives what it should."""

from __future__ import annotations

import os
import re
import time
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from tests.support import workers
from tests.support.refusals import refusal
from tests.support.workers import Pool, WorkerError


def _sum_of_ranks(offset):
    value = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(value)
    return value.item(), os.getpid()


def _raise():
    raise ValueError("a planted failure")


def _one_rank(fault, *arguments):
    if dist.get_rank() == 1:
        fault(*arguments)
    dist.barrier()


@pytest.fixture(scope="module")
def pair():
    with closing(Pool("torch", 2)) as made:
        yield made


def test_results_in_rank_order_and_processes_are_kept(pair):
    (first, second), (again, _) = pair.run(_sum_of_ranks, 10), pair.run(_sum_of_ranks, 20)
    assert (first[0], second[0], again) == (21, 21, (41, first[1]))
    assert first[1] != second[1]


def _end_before_its_callback():
    """A callback in a thread of the group holds the group last, as a communication hook of DDP does."""
    group = dist.group.WORLD
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.get_future().then(lambda future, group=group: time.sleep(0.5))


def test_a_group_is_not_let_go_of_by_its_own_thread(pair):
    pids = [pid for _, pid in pair.run(_sum_of_ranks, 0)]
    pair.run(_end_before_its_callback)
    time.sleep(1)
    assert [pid for _, pid in pair.run(_sum_of_ranks, 0)] == pids


@pytest.mark.parametrize(
    ("fault", "limit_s", "message"),
    [
        ((_raise,), 60, "rank 1:\n.*a planted failure"),
        ((os._exit, 3), 60, "rank 1:\nthe process died"),
        ((time.sleep, 600), 1, "said nothing within 1 s"),
    ],
)
def test_failures_surface_and_the_pool_recovers(pair, fault, limit_s, message, monkeypatch):
    monkeypatch.setattr(workers, "GRACE_S", 0.5)
    assert re.search(f"(?s){message}", refusal(WorkerError, lambda: pair.run(_one_rank, *fault, timeout_s=limit_s)))
    assert pair.run(_sum_of_ranks, 0)[0][0] == 1
