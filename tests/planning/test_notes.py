"""Notes beside a plan (kit/planner/explain: notes, last resorts, fewer GPUs)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kit.cost.time.step import StepTimer
from kit.planner.calibration import Calibration, Residual, kind
from kit.planner.explain import notes
from kit.planner.request import Request
from kit.planner.search import Candidate, LayoutScorer
from kit.specs.job import OptimizerSpec
from kit.specs.layout import Layout, describe
from kit.units import human_seconds
from tests.planning.questions import Z3, M, candidate, request
from tests.planning.shapes import DENSE, MIXED, NODE, NODES, Rows, by_hand, work
from tests.support.models import cluster, deepspeed, job, megatron, torch


def ran(w: Any, factor: float = 1.0, gib: float = 0.0) -> LayoutScorer:
    """What scores layouts where runs of a workload's kind took ``factor`` times as long, and so much more memory."""
    return LayoutScorer(replace(request(), calibration=Calibration({kind(w): Residual(factor, gib, 1)})))


def noted(layout: Layout, model: Any = DENSE, machines: Any = NODE, **the_job: Any) -> list[tuple[str, str, str]]:
    """(rule, chosen, beginning of the reason) of the notes."""
    return [
        (each.rule, each.chosen, each.why.partition(":")[0].partition(",")[0])
        for w in (work(layout, model, machines, **the_job),)
        for each in notes.notes(w, ran(w))
    ]


def step_s(w: Any) -> float:
    return sum(StepTimer().components_s(w).values())


FAR = replace(NODES, inter_node_gbytes_per_s=0.1)
FP8 = {"precision": "fp8"}
ON_CPU = M.but(offload_optimizer="cpu")
RIGHT_FP8 = replace(
    work(torch()),
    job=job(seq_length=1024, global_batch_size=24, precision="fp8"),
    layout=torch(dp=8, micro_batch_size=3),
)
RIGHT_BF16 = replace(RIGHT_FP8, job=replace(RIGHT_FP8.job, precision="bf16"))
RIGHT_DDP = replace(work(torch()), job=job(seq_length=1024, global_batch_size=64), cluster=FAR, layout=torch(dp=64))
RIGHT_ZERO, SECONDS = (
    replace(RIGHT_DDP, layout=deepspeed(dp=64, zero_stage=3)),
    StepTimer().components_s(request().workload(ON_CPU)),
)
NOTES: Rows = [
    ("a model that is not described", lambda: noted(torch(dp=8), MIXED), [("model", "approximate",
        "model type mixed is not described; transformers counted its parameters. Tried on described families")]),
    ("an estimated model", lambda: noted(torch(dp=8), replace(MIXED, approximate=replace(MIXED.approximate,
        counted=False)))[0][2][:60],
     "model type mixed is not described; its parameters are estimat"[:60]),
    ("long sequences", lambda: [noted(torch(dp=8), seq_length=each) for each in (4096, 4097)],
     [[], [("seq_length", "4097", "longer than the 4096 positions that dense was made for")]]),
    ("versions", lambda: noted(megatron(dp=8), optimizer=OptimizerSpec(name="muon")),
     [("optimizer", "muon", "on engine=megatron it needs Python 3.12 or newer")]),
    ("state in bf16 on Megatron", lambda: [noted(megatron(dp=8, zero_stage=1, optimizer_state_dtype="bf16",
        gradient_dtype=each), precision="bf16")[0][2] for each in ("fp32", "bf16")],
     ["moments are rounded to bf16; master weights are fp32",
      "moments and gradients are rounded to bf16; master weights are fp32"]),
    ("tensor parallelism over nodes",
     lambda: [[each.why.rpartition("; ")[2] for each in notes.notes(w, ran(w))] for w in (
         work(megatron(tp=tp), machines=cluster(machines))
         for tp, machines in ((8, "2x4xH100"), (6, "2x4xH100"), (4, "2x4xH100"), (3, "1x4xH100")))],
     [["layout.tp=4 stays inside a node"], ["layout.tp=2 stays inside a node"], [], []]),
    ("fp8", lambda: [[(each.rule, each.chosen, each.why[:24]) for each in notes._fp8(w, ran(w))] for w in (
        RIGHT_FP8, replace(RIGHT_FP8, cluster=cluster("2xcpu")), work(megatron(dp=8), **FP8), work(torch(dp=8)))],
     [[("precision", "fp8", "linear layers of the blo")], [("precision", "fp8", "emulated, for a CPU has ")], [], []]),
    ("the same step in bf16", lambda: [each.rejected for scorer in (ran(RIGHT_BF16), ran(RIGHT_BF16, 1.75))
                                      for each in notes._fp8(RIGHT_FP8, scorer)],
     [(f"bf16, the same layout: {human_seconds(factor * step_s(RIGHT_BF16))} a step",) for factor in (1, 1.75)]),
    # On slow links every way to send less gains at least a twentieth; on one node none does.
    ("compression", lambda: [[line.partition(":")[0] for each in notes._compression(
        w, ran(w)) for line in each.rejected] for w in (
        RIGHT_DDP, RIGHT_ZERO, replace(RIGHT_DDP, cluster=replace(FAR, inter_node_gbytes_per_s=1e4)))],
     [["gradient_compression=bf16", "gradient_compression=powersgd"], [
         "zero_quantized_weights", "zero_quantized_weights and zero_quantized_gradients"], []]),
    # A run's measured memory leaves no room for it, and its measured time is what a note says.
    ("compression where runs took more", lambda: [[line.partition(" ")[2] for each in notes._compression(
        RIGHT_DDP, ran(RIGHT_DDP, 2.5, gib)) for line in each.rejected] for gib in (0.0, 80.0)],
     [[f"{human_seconds(2.5 * step_s(w))} a step, {1 - step_s(w) / step_s(RIGHT_DDP):.0%} less" for w in (
         replace(RIGHT_DDP, layout=RIGHT_DDP.layout.but(gradient_compression=each)) for each in ("bf16", "powersgd"))],
      []]),
    ("ways to send less", lambda: [[name for name, _ in notes._compressed(each)] for each in (
        torch(gradient_compression="bf16"), deepspeed(zero_quantized_weights=True),
        deepspeed(zero_quantized_gradients=True))],
     [["zero_quantized_weights", "zero_quantized_weights and zero_quantized_gradients"], *[[
         "gradient_compression=bf16", "gradient_compression=powersgd"]] * 2]),
    ("what is sent", lambda: [(each.gradient_compression, each.zero_quantized_weights, each.zero_quantized_gradients)
                              for _, each in notes._compressed(Z3)],
     [("bf16", False, False), ("powersgd", False, False), ("none", True, False), ("none", True, True)]),
    ("why a last resort", lambda: [notes._reason(candidate(0.5), each) for each in (None, candidate(1.0,
        layout=M))],
     ["no other layout that kit tries fits", f"the fastest other layout takes 1,000 ms ({describe(M)})"]),
    ("seconds of offload", lambda: [notes._offload(request(), candidate(2.0, layout=each)) for each in (M,
        ON_CPU)],
     ["", f"Offload takes {human_seconds(2 * SECONDS['offload'] / sum(SECONDS.values()))} of 2 s a step. "]),
]  # fmt: skip


test_value = by_hand(NOTES)


def test_the_fastest_of_fewer_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_s = {32: 0.9, 16: 0.5, 8: 0.7}

    def faster_than(asked: Request, most_s: float) -> Candidate | None:
        seconds = steps_s.get(asked.cluster.num_gpus, 9.0)
        return candidate(seconds) if seconds < most_s else None

    monkeypatch.setattr(notes, "faster_than", faster_than)
    asked = request(machines=NODES, global_batch_size=64)
    (note,) = notes.faster_with_fewer(asked, candidate(1.0, layout=torch(dp=64)))
    assert "16 take 500 ms a step, 64 take 1 s" in note.why
    assert list(notes.faster_with_fewer(asked, candidate(0.4, layout=torch(dp=64)))) == []
