"""A trace of some steps, and what is read out of it."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from kit.training import profile
from kit.training.__main__ import main, steps_range
from tests.support import tiny
from tests.support.refusals import refusal
from tests.support.workers import Pool
from tests.training import runs


def event(name, begin, end, *called, annotation=False, device=DeviceType.CPU, is_async=False):
    """One event as torch makes them; ``called``: the operators that it calls."""
    made = FunctionEvent(
        0, name, 0, begin, end, device_type=device, is_async=is_async, is_user_annotation=annotation, use_device="cuda"
    )
    for each in called:
        made.append_cpu_child(each)
    return made


def lines(*events, whole_us):
    said = profile.report(events, whole_us / 1e6)
    return said[0].strip(), said[1].strip(), [line.split(maxsplit=6)[0::3] for line in said[2:]]


MATMUL = event("aten::mm", 0, 5)
EVENTS = [
    MATMUL,
    event("aten::linear", 0, 7, MATMUL),
    event("c10d::allreduce_", 0, 4),
    event("gloo:all_reduce", 6, 9, annotation=True, is_async=True),
    event("kit:data", 0, 7, annotation=True),
    event("kit:data", 9, 11, annotation=True),
    event("ProfilerStep#3", 0, 9, annotation=True),
]
ON_GPU = {"device": DeviceType.CUDA}
KERNELS = [
    event("ampere_sgemm", 0, 40, **ON_GPU),
    event("ampere_sgemm", 50, 80, **ON_GPU),
    event("ncclDevKernel_AllReduce_Sum_bf16", 30, 60, **ON_GPU),  # 10 of 30 beside nothing
    event("ncclDevKernel_AllGather", 85, 95, **ON_GPU),
    event("kit:forward_backward", 0, 95, annotation=True, **ON_GPU),
]


def test_a_report_is_of_the_time_that_was_traced_and_of_operators_without_those_that_they_call():
    """20 microseconds: 9 of data, 7 of operators, and 3 of communication, of which one is beside an operator."""
    assert lines(*EVENTS, whole_us=20) == (
        "data wait 45.0 %, forward and backward 0.0 %, optimizer 0.0 %, between 55.0 %",
        "CPU: computes 35.0 %, communicates 15.0 % (exposed 10.0 %), idles 55.0 %",
        [["25.0", "ms", "aten::mm"], ["15.0", "ms", "gloo:all_reduce"], ["10.0", "ms", "aten::linear"]],
    )


def test_work_on_a_gpu_is_its_kernels_and_overlapping_communication_is_not_exposed():
    assert lines(*EVENTS, *KERNELS, whole_us=100) == (
        "data wait 9.0 %, forward and backward 0.0 %, optimizer 0.0 %, between 91.0 %",
        "GPU: computes 70.0 %, communicates 40.0 % (exposed 20.0 %), idles 10.0 %",
        [
            [share, "ms", each.name]
            for share, each in (("70.0", KERNELS[0]), ("30.0", KERNELS[2]), ("10.0", KERNELS[3]))
        ],
    )
    assert lines(*KERNELS, whole_us=80)[1].endswith("idles 0.0 %"), "what began before the clock"


def _profiled(rundir):
    return runs.run(rundir, profile=(3, 4))


def test_a_run_of_two_ranks(tmp_path):
    rundir = runs.prepare(tmp_path / "run", tiny.plan(dp=2))
    # Alone: torch's profiler ended a process that had served a hundred other cases.
    with closing(Pool("torch", 2)) as alone:
        alone.run(_profiled, rundir)
    assert runs.names(rundir.path / "profile") == ["rank-00000.json", "rank-00001.json"]
    trace = json.loads((rundir.path / "profile" / "rank-00000.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"kit:data", "kit:forward_backward", "kit:optimizer", "gloo:all_reduce", "aten::mm"} <= names


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
    refusal(SystemExit, main, ["run", "--profile", text])
    assert "is not a range of steps; use 5-8" in capsys.readouterr().err
