"""A trace of some steps, and what is read out of it."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from kit.training.__main__ import main
from kit.training.profile import Work, own_times, parse, shares
from tests.support import tiny
from tests.support.workers import pool
from tests.training import runs


def test_overlapping_communication_is_not_exposed():
    work = [
        Work("matmul", 0, 40, False),
        Work("matmul", 50, 80, False),
        Work("ncclDevKernel_AllReduce", 30, 60, True),  # 10 of 30 beside nothing
        Work("ncclDevKernel_AllGather", 85, 95, True),
    ]
    assert dataclasses.astuple(shares(work, 100)) == pytest.approx((0.7, 0.4, 0.2, 0.1))


def test_an_operator_does_not_pay_for_those_it_calls():
    work = [Work("linear", 0, 10, False), Work("addmm", 2, 9, False), Work("linear", 20, 25, False)]
    assert own_times(work) == {"linear": (8, 2), "addmm": (7, 1)}


def test_a_gpu_s_trace_is_its_kernels():
    def event(name, category, begin, duration):
        return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": duration}

    trace = parse(
        [
            event("aten::mm", "cpu_op", 0, 5),
            event("ampere_sgemm", "kernel", 3, 50),
            event("ncclDevKernel_ReduceScatter_Sum_bf16", "kernel", 40, 30),
            event("kit:data", "user_annotation", 0, 7),
            {"ph": "i", "name": "instant", "ts": 1},
        ]
    )
    assert trace.on_gpu
    assert [(work.name, work.communicates) for work in trace.work] == [
        ("ampere_sgemm", False),
        ("ncclDevKernel_ReduceScatter_Sum_bf16", True),
    ]
    assert trace.parts == {"kit:data": 7}


def _profiled(rundir):
    return runs.run_any(rundir, profile=(3, 4))


def test_a_run_of_two_ranks(tmp_path, capfd):
    rundir = runs.prepare(tmp_path / "run", tiny.plan(dp=2))
    pool("torch", 2).run(_profiled, rundir)
    assert runs.names(rundir.path / "profile") == ["rank-00000.json", "rank-00001.json"]
    trace = parse(json.loads((rundir.path / "profile" / "rank-00000.json").read_text())["traceEvents"])
    assert not trace.on_gpu
    assert {"kit:data", "kit:forward_backward", "kit:optimizer"} <= trace.parts.keys()
    talked = {work.name for work in trace.work if work.communicates}
    assert any("gloo:all_reduce" in name or "gloo:allreduce" in name for name in talked), talked
    assert any(work.name == "aten::addmm" or work.name == "aten::mm" for work in trace.work)


def test_what_is_printed(tmp_path, capsys, one_process):
    runs.run(runs.prepare(tmp_path / "run"), profile=(2, 3))
    lines = capsys.readouterr().out.splitlines()
    (at,) = (
        index for index, line in enumerate(lines) if line.startswith("profile of steps 2-3 (rank 0, profile/rank-")
    )
    assert lines[at + 1].startswith("  data wait ")
    assert re.fullmatch(
        r"  CPU: computes [\d.]+ %, communicates [\d.]+ % \(exposed [\d.]+ %\), idles [\d.]+ %", lines[at + 2]
    )
    assert any("aten::" in line for line in lines[at + 3 : at + 11])
    shares_of_parts = [float(word.split()[-2]) for word in lines[at + 1].split(",")]
    assert sum(shares_of_parts) == pytest.approx(100, abs=0.3)


@pytest.mark.parametrize("text", ["x", "0-3", "5-2"])
def test_a_range_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--profile", text])
    assert "is not a range of steps; use 5-8" in capsys.readouterr().err
