"""A slow rank is named while the run goes on, whichever part of its own work is slow; ranks that keep pace are not."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from kit.addons.doctor.logs.diagnosis import diagnose
from kit.training import stragglers
from tests.support import tiny
from tests.support.calls import before
from tests.training import runs

FAULTS = {
    "data": "kit.training.data.loader.Prefetcher.step",
    "forward": "torch.nn.Linear.forward",
    "embedding": "megatron.core.tensor_parallel.layers.VocabParallelEmbedding.forward",
}
SLEEP_S = {"data": 0.15, "forward": 0.004, "embedding": 0.03}
"""A micro batch has fifteen linear layers and one embedding."""


def _train(rundir, fault):
    """Rank 1 sleeps in each call of ``fault``."""
    import pydoc

    import torch.distributed as dist

    owner, name = FAULTS[fault].rsplit(".", 1)
    with pytest.MonkeyPatch.context() as patch:
        before(patch, pydoc.locate(owner), name, lambda *_: time.sleep(SLEEP_S[fault] * dist.get_rank()))
        return runs.run(rundir)


@pytest.mark.everyday("data-layout0")
@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        ("data", {}),
        ("forward", {}),
        ("forward", {"zero_stage": 3}),
        ("forward", {"engine": "deepspeed", "zero_stage": 3}),
        ("embedding", {"engine": "megatron", "implementation": "local"}),
    ],
)
def test_a_slow_rank_is_named_within_two_comparisons(tmp_path, fault, layout):
    rundir = runs.prepare(tmp_path / "run", tiny.plan(dp=2, **layout), steps=20)
    runs.everywhere(rundir, _train, fault)
    events = runs.events(rundir)
    assert [(event["event"], event["step"], event["rank"]) for event in events] == [("slow rank", 20, 1)]
    rows = [row for row in runs.steps(rundir) if row["slowest_rank"] is not None]
    assert [row["step"] for row in rows] == [10, 20]
    assert all(row["slowest_rank"] == 1 and row["slowest_rank_ratio"] > stragglers.SLOW for row in rows)
    (cause,) = diagnose([rundir.path])
    assert (cause.cause, cause.ranks, cause.step) == ("slow-rank", (1,), 20)
    assert f"rank 1 on {events[0]['host']} works" in cause.meaning


@pytest.mark.parametrize(
    ("ratio", "excess_s", "step_s", "slow"),
    [(1.6, 0.1, 1.0, True), (1.4, 0.1, 1.0, False), (1.6, 0.01, 1.0, False), (9.0, 0.0009, 0.001, False)],
)
def test_a_small_difference_is_not_named(ratio, excess_s, step_s, slow):
    assert stragglers.is_slow(stragglers.Slowest(0, ratio, excess_s), step_s) == slow


@pytest.mark.parametrize(
    ("times", "stages", "named"),
    [
        ([1, 1, 1, 2], 1, (3, 2.0)),
        ([1, 1, 4, 4], 2, (0, 1.0)),  # another stage has other layers
        ([1, 1, 4, 12], 2, (3, 3.0)),
        ([3, 3, 1, 1], 1, (0, 3.0)),  # two that wait for each other
        ([1, 5], 2, None),
        ([0, 0], 1, None),
    ],
)
def test_ranks_are_compared_within_their_stage(times, stages, named):
    found = stragglers.slowest(times, stages)
    assert (found and (found.rank, found.ratio)) == named


def test_innermost_modules_are_timed_and_a_compiled_one_as_a_whole():
    plain, compiled = (torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()) for _ in range(2))
    compiled.forward = lambda value: value
    compiled.forward._torchdynamo_orig_callable = plain.forward
    whole = torch.nn.ModuleDict({"plain": plain, "compiled": compiled})
    found = stragglers._innermost({name: module for name, module in whole.named_modules() if name})
    assert {id(each) for each in found} == {id(plain[0]), id(plain[1]), id(compiled)}


# Times: One rank of a stage of two, whose other one is written here, as are the ranks of another stage.


@pytest.fixture
def ranks(monkeypatch):
    """Their stragglers; the module takes two seconds and the other rank's work three, of half as many tokens."""
    times, said = iter(range(0, 2000, 2)), []
    monkeypatch.setattr(stragglers.time, "perf_counter", lambda: next(times))
    answers = {str: lambda host: ["here", *["there"] * 3], float: lambda mine: [mine, 3.0, 90.0, 90.0]}
    monkeypatch.setattr(stragglers, "gather", lambda value, group=None: answers[type(value)](value))
    log = SimpleNamespace(log=said.append, log_event=lambda event, step, **values: said.append((event, step, values)))
    module = torch.nn.Linear(1, 1)
    engine = SimpleNamespace(dp_size=2, modules=lambda: {"module": module})
    return stragglers.Stragglers(engine, tiny.plan(dp=2, pp=2, micro_batch_size=3), log), module, said


def step(ranks, number, data_s):
    found, module, _ = ranks
    with found.timed(number):
        module(torch.zeros(1, 1))
    found.sample(data_s, [SimpleNamespace(input_ids=torch.zeros(3, tiny.SEQ_LENGTH // 2))])
    return found.judge(number, 10.0)


def test_the_shortest_of_three_steps_before_an_exchange_counts(ranks):
    """Rows of half the length count double: 2 · 2 s, and the data."""
    data = {7: 0.0, 8: 8.0, 9: 2.0, 10: 5.0}
    found = [step(ranks, number, data.get(number, 0.0)) for number in range(1, 11)]
    assert found == [None] * 9 + [stragglers.Slowest(0, 6.0 / 3.0, 3.0)]
    assert not ranks[2], "once is chance"


def test_a_rank_is_named_at_its_second_time_and_when_it_keeps_pace(ranks):
    for number in range(1, 61):
        step(ranks, number, 9.0 if number <= 30 else 0.0)
    assert [each[:2] for each in ranks[2] if isinstance(each, tuple)] == [
        ("slow rank", 20),
        ("slow rank keeps pace", 50),
    ]
    assert ranks[2][1][2] == {"rank": 0, "host": "here", "ratio": 13.0 / 3.0, "excess_s": 10.0}
    assert ranks[2][0].startswith("slow rank 0 on here: works 4.3 times as long as the others, 1e+04 ms more a step")
