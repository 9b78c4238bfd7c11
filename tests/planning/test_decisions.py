"""What is said of a plan's choices (kit/planner/explain/decisions), on fabricated searches."""

from __future__ import annotations

from typing import Any

from kit.cost.hardware import usable_gib
from kit.cost.time.step import StepTimer
from kit.planner.explain import decisions
from kit.planner.plan import Alternative
from kit.planner.search import Candidate, SearchResult
from kit.specs.layout import Pins, describe
from kit.units import human_count, human_seconds
from tests.planning.questions import OVER, TORCH, Z2, Z3, M, candidate, request
from tests.planning.shapes import DENSE, EXPERTS, MIXED, NODE, Rows, by_hand
from tests.support.models import deepspeed, megatron, torch


def choice(name: str, *more: Candidate, pins: Pins | None = None, best: Candidate | None = None) -> Any:
    """What is said of a choice, on a fabricated search."""
    chosen = best or candidate(1.0, layout=M.but(tp=2, sp=True))
    found = decisions._choice(name, request(pins), SearchResult(chosen, (chosen, *more), False), chosen)
    return found and (found.chosen, found.why, found.rejected)


DDP = torch(dp=8, micro_batch_size=2)


def compared(model: Any, **faster: bool) -> float:
    """Step with these choices over the step without, of DDP."""
    then, now = (StepTimer().components_s(request(model=model).workload(each)) for each in (DDP.but(**faster), DDP))
    return sum(then.values()) / sum(now.values())


DESCRIBED: Rows = [
    ("layouts in a line", lambda: [describe(each) for each in (
        torch(), torch(dp=2), torch(dp=2, zero_stage=2), torch(zero_stage=3), Z2, OVER.but(sp=True), deepspeed(),
        megatron(
            dp=2, tp=2, cp=3, pp=5, vp=7, ep=4, etp=6, cp_comm_type="p2p", first_stage_layers=1, last_stage_layers=2),
            megatron(
                zero_stage=0, cp_comm_type="p2p", offload_optimizer="cpu", optimizer_offload_fraction=0.25), torch(
                    chunked_loss=True, recompute="full", micro_batch_size=3, gradient_accumulation_steps=4))],
     ["torch, dp=1, micro batch 1 x 1", "torch, dp=2, DDP, micro batch 1 x 1",
         "torch, dp=2, FSDP2 (zero_stage=2), micro batch 1 x 1",
      "torch, dp=1, FSDP2, micro batch 1 x 1", "deepspeed, dp=8, ZeRO-2, micro batch 1 x 1",
      "deepspeed over megatron, tp=2, sp, dp=1, ZeRO-3, micro batch 1 x 1", "deepspeed, dp=1, micro batch 1 x 1",
      "megatron, tp=2, cp=3, pp=5, vp=7, ep=4, etp=6, end stages of 1 and 2 layers, dp=2, distributed optimizer, "
      "ring attention, micro batch 1 x 1", "megatron, dp=1, optimizer on host, 0.25 of it, micro batch 1 x 1",
      "torch, dp=1, full recompute, chunked loss, micro batch 3 x 4"]),
    ("what an alternative costs", lambda: [decisions._cost_of(each, NODE) for each in (candidate(0.5, 7.25),
        candidate(None, 100.0))],
     ["500 ms a step, 7.2 GiB", f"needs 100.0 GiB, {100 - usable_gib(NODE.gpu):.1f} too many"]),
    ("what else is different", lambda: [decisions._besides(name, M, M.but(**more)) for name, more in (
        ("tp", {"tp": 2}), ("tp", {"tp": 2, "pp": 4, "recompute": "full"}), ("recompute", {"recompute": "full"}), ("tp",
        {
            "implementation": "transformer_engine", "offload_param": "cpu", "micro_batch_size": 2}), ("offload_param", {
                "offload_param": "cpu", "offload_optimizer": "cpu"}), ("micro_batch_size", {"micro_batch_size": 2}))]
     + [decisions._besides("tp", M.but(recompute="full"), M)],
     ["", " (with pp=4, full recompute)", "", " (with transformer_engine, offload_param=cpu, micro batch 2)",
      " (with offload_optimizer=cpu)", "", " (with no recompute)"]),
    ("why a value", lambda: [decisions._why(name, candidate(1.0, layout=layout),
        [candidate(each) for each in others]) for name, layout, others in (
        ("tp", M, (None,)), ("tp", M, (1.0, 2.0)), ("tp", M.but(tp=2), (0.5, 0.8)), ("zero_stage", Z3, (3.0,)), ("sp",
        M.but(sp=True), (3.0,)))],
     ["no layout that was compared fits with another value", "matrices stay whole; the fastest that fits",
      "every matrix is split inside a node; 100.0% slower than the fastest, but simpler or smaller",
      "optimizer state, gradients and weights are sharded over the data-parallel ranks; the fastest that fits",
      "norms and residuals are split over the tensor-parallel ranks; the fastest that fits"]),
    ("why an engine", lambda: [decisions._reason((candidate(1.0, layout=a),), candidate(seconds,
        layout=b)) for a, seconds, b in (
        (M, 1.0, M), (M, 1.005, M), (M, 1.005, Z2), (OVER, 1.005, torch(tp=2)))],
     ["the fastest that fits",
         "the fastest engine; this layout is 0.5% slower than its fastest, but simpler or smaller (differences under "
      "3% are within the model's error)", "the simplest within 3% of the fastest (0.5% slower than megatron)",
      "the simplest within 3% of the fastest (0.5% slower than deepspeed over megatron)"]),
    ("differences of a step", lambda: decisions._difference(candidate(10.0, 20.0), candidate(11.0, 15.9), {
        "compute": 8.0, "pipeline_bubble": 1.0, "launch": 0.5, "offload": 0.0, "optimizer": 0.5}, {
            "compute": 7.0, "pipeline_bubble": 2.5, "launch": 0.52, "offload": 0.2, "optimizer": 0.97}),
     "+10.0% a step (pipeline bubble +15.0%, compute -10.0%, optimizer +4.7%), -4.1 GiB"),
    ("equal steps", lambda: decisions._difference(candidate(1.0), candidate(1.0), {"compute": 1.0}, {"compute": 1.0}),
        "+0.0% a step, +0.0 GiB"),
    ("numbers", lambda: [*map(human_count, (1e12, 999.7e9, 8.03e9, 123.0)), *map(human_seconds, (0.42, 0.9999, 112.0,
        1.8e8)),
                         human_seconds(121.0, like=112.0)],
     ["1T", "1T", "8.03B", "123", "420 ms", "1 s", "112 s", "2,080 days", "121 s"]),
    ("calibrated parts", lambda: decisions._corrected({"a": 1.0, "b": 3.0}, candidate(8.0)), {"a": 2.0, "b": 6.0}),
    ("the best with a value", lambda: [decisions._rival([candidate(1.0, layout=M, tp=2, vp=2), candidate(2.0, layout=M,
        vp=2), candidate(
        None, 1.0, layout=M, vp=2)], name, candidate(1.0, layout=M)).step_time_s for name in ("vp", "tp")], [2.0, 1.0]),
    ("the best of another split where the same one does not fit", lambda: decisions._rival([candidate(1.0, layout=M,
        tp=2, vp=2), candidate(None, 99.0, layout=M, vp=2)], "vp", candidate(1.0, layout=M)).step_time_s, 1.0),
]  # fmt: skip
CHOICES: Rows = [
    ("pinned", lambda: choice("tp", pins=Pins(tp=2)), ("2", "pinned", ())),
    ("no other value", lambda: choice("tp", candidate(0.5, layout=Z2.but(tp=4))), None),
    ("no word of sp without tp, of vp without pp", lambda: [choice(name, candidate(2.0, layout=M), best=candidate(1.0,
        layout=M.but(
        **{name: value}))) for name, value in (("sp", True), ("vp", 2))], [None, None]),
    ("rivals, the fastest first, then those that do not fit", lambda: choice("tp", *[candidate(seconds, gib,
        layout=M.but(tp=tp)) for seconds, gib, tp in (
        (3.0, 1.0, 4), (None, 99.0, 1), (2.0, 1.0, 8), (4.0, 1.0, 8), (5.0, 1.0, 16), (6.0, 1.0, 32))])[2],
     ("8: 2 s a step, 1.0 GiB", "4: 3 s a step, 1.0 GiB", "16: 5 s a step, 1.0 GiB", "32: 6 s a step, 1.0 GiB")),
    ("a flag", lambda: choice("sp", candidate(2.0, layout=M.but(tp=2)))[0], "true"),
    ("other splits of the work", lambda: [[each.partition(", ZeRO-")[2][
        :1] for each in found.rejected] for found in decisions._alternatives(
        request(), SearchResult(None, tuple(candidate(seconds, layout=each) for seconds, each in (
            (3.0, Z3), (2.0, Z2), (1.5, M.but(micro_batch_size=2)), (None, torch()), (2.5, Z2))), False), candidate(1.0,
            layout=M))],
     [["2", "3"]]),
    # With the room that the search asks for: 72 of 75.1 GiB leave less than 8 %, so 1.9 s are not DeepSpeed's time.
    ("engines that were weighed", lambda: decisions._engine(request(), SearchResult(None, (
        candidate(1.0, layout=M), candidate(1.9, 72.0, layout=Z2), candidate(2.0, layout=Z2), candidate(3.0, layout=Z2),
        candidate(None, 100.0)), False),
        candidate(1.0, layout=M)).rejected,
     [f"{describe(torch())}: needs 100.0 GiB, {100 - usable_gib(NODE.gpu):.1f} too many",
         f"{describe(Z2)}: +100.0%, 2 s a step, 9.0 GiB"]),
    ("the best of each other engine that fits", lambda: [decisions.alternatives(request(pins), SearchResult(
        candidate(1.0, layout=M), (candidate(1.0, layout=M), candidate(1.9, 72.0, layout=Z2), candidate(3.0, layout=Z2),
        candidate(2.0, layout=Z2), candidate(None, 100.0)), False)) for pins in (Pins(), Pins(engine="megatron"))],
     [(Alternative(layout=describe(Z2), step_time_s=2.0),), ()]),
    ("engines that cannot", lambda: decisions._engine(request(precision="fp16"), SearchResult(None, (candidate(1.0,
        layout=Z2),), False),
                                                      candidate(1.0, layout=Z2)).rejected,
     ["torch: precision=fp16 is not supported; use bf16, fp32 or fp8",
         "megatron: precision=fp16 is not supported; use bf16, fp32 or fp8"]),
    # A torch layout on several GPUs is also told with what only --engine torch tries, if that is legal.
    ("the fast path", lambda: [decisions._fast_path(request(model=model), candidate(seconds, layout=each)) for seconds,
        each, model in (
        (2.0, DDP, DENSE), (2.0, DDP, EXPERTS), (2.0, DDP, MIXED), (None, DDP, DENSE), (2.0, Z2, DENSE), (2.0,
        DDP.but(tp=2), DENSE),
        (2.0, DDP.but(compile_layers=True), DENSE))],
     [f"; {human_seconds(2.0 * compared(DENSE, chunked_loss=True, compile_layers=True), like=2.0)} with compiled "
      f"blocks and a chunked loss, which "
      "--engine torch tries too",
          f"; {human_seconds(2.0 * compared(EXPERTS, chunked_loss=True), like=2.0)} with a chunked loss, which "
          f"--engine "
      "torch tries too", *[""] * 5]),
    ("a pinned engine", lambda: decisions._engine(request(TORCH), SearchResult(None, (), False), candidate(1.0)).why,
        "pinned"),
    ("what makes another split", lambda: [decisions._split_of(M) == decisions._split_of(M.but(**each)) for each in (
        {"tp": 2}, {"pp": 2}, {"cp": 2}, {"ep": 2}, {"zero_stage": 0}, {"offload_optimizer": "cpu"},
        {"engine": "torch"}, {"dp": 2}, {"vp": 2},
        {"recompute": "full"})], [False] * 7 + [True] * 3),
    ("no other split", lambda: list(decisions._alternatives(request(), SearchResult(None, (candidate(1.0, layout=M),),
        False), candidate(1.0, layout=M))), []),
    ("at most four", lambda: len(next(decisions._alternatives(request(), SearchResult(None, tuple(candidate(2.0,
        layout=each) for each in (
        *(M.but(tp=each) for each in (2, 4, 8, 1, 1)), Z2, Z3)), False), candidate(1.0, layout=M))).rejected), 4),
]  # fmt: skip


test_value = by_hand(DESCRIBED, CHOICES)
