"""A trace of some steps, and what is read out of it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kit.training.__main__ import main, steps_range
from kit.training.profile import Work, own_times, parse, shares, trace_report
from tests.support import tiny
from tests.support.workers import Pool
from tests.training import runs


def test_overlapping_communication_is_not_exposed():
    work = [
        Work("matmul", 0, 40, False),
        Work("matmul", 50, 80, False),
        Work("ncclDevKernel_AllReduce", 30, 60, True),  # 10 of 30 beside nothing
        Work("ncclDevKernel_AllGather", 85, 95, True),
    ]
    assert dataclasses.astuple(shares(work, 100)) == pytest.approx((0.7, 0.4, 0.2, 0.1))
    assert shares(work, 80).idle == 0.0, "what began before the clock"


@pytest.mark.parametrize(
    ("work", "own"),
    [
        ([("linear", 0, 10), ("addmm", 2, 9), ("linear", 20, 25)], {"linear": (8, 2), "addmm": (7, 1)}),
        (
            [("a", 0, 10), ("b", 1, 8), ("c", 2, 5), ("c", 5, 6), ("d", 9, 10)],
            {"a": (2, 1), "b": (3, 1), "c": (4, 2), "d": (1, 1)},
        ),
        ([("a", 0, 10), ("b", 5, 15)], {"a": (10, 1), "b": (10, 1)}),  # two streams: neither called the other
        ([("a", 0, 10), ("b", 0, 4)], {"a": (6, 1), "b": (4, 1)}),  # the longer one called
    ],
)
def test_an_operator_does_not_pay_for_those_it_calls(work, own):
    assert own_times([Work(*each, False) for each in work]) == own


def event(name, category, begin, duration, kind="X"):
    return {"ph": kind, "name": name, "cat": category, "ts": begin, "dur": duration}


EVENTS = [
    event("aten::mm", "cpu_op", 0, 5),
    event("c10d::allreduce_", "cpu_op", 0, 4),
    event("gloo:all_reduce", "user_annotation", 6, 2),
    event("kit:data", "user_annotation", 0, 7),
    event("kit:data", "user_annotation", 9, 2),
    event("ProfilerStep#3", "user_annotation", 0, 9),
    event("async", "cpu_op", 0, 9, kind="b"),
    {"ph": "i", "name": "instant", "ts": 1},
]
KERNELS = [
    event("ampere_sgemm", "kernel", 3, 50),
    event("ncclDevKernel_ReduceScatter_Sum_bf16", "kernel", 40, 30),
    event("Memcpy HtoD", "gpu_memcpy", 80, 1),
]


@pytest.mark.parametrize(
    ("events", "work"),
    [
        (EVENTS, [("aten::mm", 0, 5, False), ("gloo:all_reduce", 6, 8, True)]),
        (
            [*EVENTS, *KERNELS],
            [
                ("ampere_sgemm", 3, 53, False),
                ("ncclDevKernel_ReduceScatter_Sum_bf16", 40, 70, True),
                ("Memcpy HtoD", 80, 81, False),
            ],
        ),
    ],
)
def test_work_is_a_gpu_s_kernels_or_a_cpu_s_operators(events, work):
    trace = parse(events)
    assert trace.on_gpu == (events != EVENTS)
    assert [dataclasses.astuple(each) for each in trace.work] == work
    assert trace.parts["kit:data"] == 9


def test_a_report_is_of_the_time_that_was_traced():
    """20 microseconds: 9 of data, 5 and 2 of work that do not meet."""
    assert trace_report(parse(EVENTS), 20e-6, "kit:", top=1) == [
        "  data wait 45.0 %, forward and backward 0.0 %, optimizer 0.0 %, between 55.0 %",
        "  CPU: computes 25.0 %, communicates 10.0 % (exposed 10.0 %), idles 65.0 %",
        "   25.0 %       0.01 ms       1 ×  aten::mm",
    ]


def _profiled(rundir):
    return runs.run(rundir, profile=(3, 4))


def test_a_run_of_two_ranks(tmp_path, capfd):
    rundir = runs.prepare(tmp_path / "run", tiny.plan(dp=2))
    alone = Pool("torch", 2)  # torch's profiler ended a process that had served a hundred other cases
    try:
        alone.run(_profiled, rundir)
    finally:
        alone.close()
    assert runs.names(rundir.path / "profile") == ["rank-00000.json", "rank-00001.json"]
    trace = parse(json.loads((rundir.path / "profile" / "rank-00000.json").read_text())["traceEvents"])
    assert not trace.on_gpu
    assert {"kit:data", "kit:forward_backward", "kit:optimizer"} <= trace.parts.keys()
    talked = {work.name for work in trace.work if work.communicates}
    assert any("gloo:all_reduce" in name or "gloo:allreduce" in name for name in talked), talked
    assert any(work.name == "aten::addmm" or work.name == "aten::mm" for work in trace.work)


def test_what_is_printed(tmp_path, capsys, one_process):
    runs.trained(tmp_path / "run", steps=3, profile=(2, 3))
    lines = capsys.readouterr().out.splitlines()
    (at,) = (k for k, line in enumerate(lines) if line.startswith("profile of steps 2-3 (rank 0, profile/rank-"))
    assert lines[at + 1].startswith("  data wait ")
    assert any("aten::" in line for line in lines[at + 3 : at + 11])
    assert sum(float(word.split()[-2]) for word in lines[at + 1].split(",")) == pytest.approx(100, abs=0.3)


@pytest.mark.parametrize(("text", "steps"), [("5-8", (5, 8)), ("5", (5, 5)), ("1-1", (1, 1))])
def test_a_range_of_steps(text, steps):
    assert steps_range(text) == steps


@pytest.mark.parametrize("text", ["x", "0-3", "5-2", "5-x", ""])
def test_a_range_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--profile", text])
    assert "is not a range of steps; use 5-8" in capsys.readouterr().err
