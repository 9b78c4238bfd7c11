"""What the search compares and takes (kit/planner/search, last resorts, requests): ties, limits, further layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit import api
from kit.addons.ui.answer import pareto_front
from kit.cost.hardware import usable_gib
from kit.cost.workload import Workload
from kit.planner import search
from kit.planner.compare import ComparedLayout
from kit.planner.fallbacks import FALLBACKS, ON_HOST, without_loss
from kit.planner.request import Request
from kit.planner.search import SearchResult, _best, _needs_no_less, engine_simplicity, simplicity, step_s
from kit.specs.layout import Layout, Pins
from kit.specs.recipe import recipe_of_data
from tests.planning.questions import LORA, ONE, OVER, SHORT, TORCH, Z2, Z3, M, candidate, request
from tests.planning.shapes import EXPERTS, NODE, Rows, by_hand
from tests.support.models import deepspeed, job, megatron, torch

SEARCH: Rows = [
    ("engines, simplest first", lambda: [engine_simplicity(each) for each in (torch(), Z2, M, OVER, torch(tp=2))], [0,
        1, 2, 3, 3]),
    # Each field in its place: host before disks, stages, splits, ring, experts, chunks, recompute, ZeRO, savers, rows.
    ("simplicity", lambda: simplicity(megatron(tp=2, cp=3, pp=5, ep=7, vp=11, cp_comm_type="p2p", recompute="selective",
                                               offload_optimizer="cpu", micro_batch_size=13)),
     (1, 2, 5, 6, 1, 7, 11, 1, 1, 1, 0, 13)),
    ("simplicity of savers", lambda: simplicity(deepspeed(zero_stage=3, zero_hpz=8, offload_optimizer="nvme",
        offload_param="cpu",
        recompute="full", chunked_loss=True, activation_offloading=True, tiled_mlp=True, compile_layers=True)),
     (3, 1, 1, 1, 0, 1, 1, 2, 3, 8, 4, 1)),
    ("the simplest of those equally fast", lambda: [getattr(_best(each, request()), "step_time_s", None) for each in (
        (candidate(1.0, layout=M), candidate(1.03, layout=Z2)), (candidate(1.0, layout=M), candidate(1.0301,
        layout=Z2)),
        (candidate(1.001, layout=M), candidate(1.0, layout=M)), (candidate(None), candidate(2.0, layout=M)),
        (candidate(1.0, layout=SHORT), candidate(1.02, layout=M)), (candidate(None),), ())],
     [1.03, 1.0, 1.0, 2.0, 1.02, None, None]),
    # 75.145 GiB of an H100 are usable, so 69.58 with room for an error of 8 %.
    ("room for the error of the peak", lambda: [step_s(_best((
        candidate(1.0, gib), candidate(slow, 60.0, micro_batch_size=2)), replace(request(), tight=tight)))
        for gib, slow, tight in ((69.6, 1.05, False), (69.5, 1.05, False), (69.6, 1.1, False), (69.6, 1.11, False),
        (69.6, 1.05, True))],
     [1.05, 1.0, 1.1, 1.0, 1.0]),
    # A larger micro batch, less recompute or fewer savers need no less memory, if all else is the same.
    ("what needs no less", lambda: [_needs_no_less(Z2.but(**a), Z2.but(**b)) for a, b in (
        ({}, {"micro_batch_size": 2}), ({"micro_batch_size": 2}, {}), ({"recompute": "full"}, {}), ({},
        {"recompute": "full"}),
        ({"activation_offloading": True}, {}), ({}, {"activation_offloading": True}), ({"tiled_mlp": True}, {}), ({},
        {"tiled_mlp": True}),
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 2, "micro_batch_size": 2}),
        ({"gradient_accumulation_steps": 2}, {"micro_batch_size": 2}), ({}, {"zero_stage": 3}), ({}, {}))],
     [True, False, True, False, True, False, True, False, True, False, False, True]),
    # The user's pins forbid a last resort, or have it already; only pretrain_gpt.py trains moments in bf16.
    ("last resorts", lambda: [[each.added_to(request(pins,
        objective=objective)) is not None for group in FALLBACKS for each in group]
                              for pins, objective in ((Pins(), "pretrain"), (Pins(), "sft"), (Pins(engine="torch"),
                              "pretrain"), (Pins(
                                  activation_offloading=True), "pretrain"), (Pins(engine="megatron",
                                  offload_optimizer="cpu"), "pretrain"))],
     [[True] * 4, [True, True, False, True], [False, True, False, False], [True, False, True, True],
      [True, True, True, False]]),
    ("a pinned share", lambda: [ON_HOST.added_to(request(Pins(engine="megatron", offload_optimizer="cpu",
        optimizer_offload_fraction=0.5))),
                                ON_HOST.added_to(request()).pins.optimizer_offload_fraction], [None, 0.25]),
    ("what forbids it", lambda: [each.forbidden_by for group in FALLBACKS for each in group],
     ["layout.offload_optimizer=none", "layout.activation_offloading=false",
      *["layout.optimizer_state_dtype=fp32"] * 2]),
    ("without loss", lambda: [without_loss(each).optimizer_state_dtype for each in (Pins(),
        Pins(optimizer_state_dtype="bf16"))], ["fp32", "bf16"]),
    ("balancing as published", lambda: [getattr(Request(model=replace(EXPERTS, family=family, num_shared_experts=0,
        first_dense_layers=0), cluster=NODE,
        job=job(**more)).job.balancing, "moe_aux_loss_coeff", None) for family, more in (
            ("mixtral", {}), ("mixtral", {"objective": "sft"}), ("mixtral", {"lora": LORA}), ("qwen3_moe", {}))],
     [0.02, None, None, 0.001]),
    ("the front of a comparison", lambda: [each.name for each in pareto_front(ComparedLayout(name, M,
        gib, seconds, fits) for name, gib, seconds, fits in (
        ("slow and small", 1.0, 9.0, True), ("dominated", 5.0, 5.0, True), ("fast", 8.0, 2.0, True), ("too large", 9.0,
        1.0, False), ("middle", 4.0, 4.0, True),
        ("equal", 4.0, 6.0, True), ("as fast", 9.0, 2.0, True)))], ["fast", "middle",
        "slow and small"]),
    ("last resorts that are taken unasked", lambda: [len(search._allowed(request(each))) for each in (
        Pins(), Pins(engine="torch"), Pins(implementation="local"), Pins(tp=2))], [3, 3, 3, 1]),
    ("engines on request", lambda: [[each.pins.engine for each in search._on_request(request(pins,
        machines=machines))] for pins, machines in (
        (None, NODE), (None, ONE), (TORCH, ONE))], [["torch", "deepspeed"], ["torch", "deepspeed", "megatron"], []]),
    ("a step of what fits", lambda: [search.LayoutScorer(request()).candidate(request().workload(M),
        each).step_time_s is None for each in (0.1, 99.0)],
     [True, False]),
]  # fmt: skip


test_value = by_hand(SEARCH)


class Scored(search.LayoutScorer):
    """Memory and step of a layout by where its optimizer is; without recompute 20 GiB more."""

    def __init__(self, asked: Request, gib: dict[str, float], seconds: dict[str, float]) -> None:
        super().__init__(asked)
        self.gib, self.seconds = gib, seconds

    def peak_gib(self, w: Workload) -> float:
        return self.gib[w.layout.offload_optimizer] + 20.0 * (w.layout.recompute == "none")

    def step_time_s(self, w: Workload) -> float:
        return self.seconds[w.layout.offload_optimizer]

    def least_s(self, w: Workload) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("zero", "usual_gib", "gib", "seconds", "taken"),
    [
        (2, 10.0, 9.0, 0.5, "cpu"), (2, 10.0, 10.5, 0.5, "none"), (2, 10.0, 9.0, 2.0, "none"), (3, 10.0, 13.0, 0.5,
        "cpu"),
        (3, 10.0, 14.5, 0.5, "none"), (2, 90.0, 70.0, 9.0, "cpu"), (2, 90.0, 80.0, 9.0, ""),
    ],
)  # fmt: skip
def test_further_layouts_are_taken_as_far_as_they_need_less(
    zero: int, usual_gib: float, gib: float, seconds: float, taken: str
) -> None:
    """Less than every usual layout; ZeRO-3's at most a twentieth of an H100's 80 GiB more. 75.6 GiB are usable."""
    asked = request(Pins(engine="deepspeed", zero_stage=zero, offload_param="none", micro_batch_size=2))
    scorer = Scored(asked, {"none": usual_gib, "cpu": gib, "nvme": 99.0}, {"none": 1.0, "cpu": seconds, "nvme": 1.0})
    found = search._without_fallbacks(asked, scorer)
    assert (found.best.layout.offload_optimizer if found.best else "") == taken
    assert found.further == (taken != "none")


@pytest.mark.parametrize(
    ("best", "machines", "pins", "faster", "taken"),
    [
        (SHORT, NODE, Pins(), True, True), (None, NODE, Pins(), True, False), (SHORT, ONE, Pins(), True, False), (Z3,
        NODE, Pins(), True, False),
        (SHORT, NODE, Pins(offload_optimizer="cpu"), True, False), (SHORT, NODE, Pins(engine="torch"), True, False),
        (SHORT, NODE, Pins(), False, False),
    ],
)  # fmt: skip
def test_megatrons_optimizer_on_the_host_is_taken_where_another_one_is_there_unasked_and_slower(
    best: Layout | None, machines: Any, pins: Pins, faster: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, quick = (best and candidate(2.06, layout=best)), candidate(1.5, layout=M)
    found = SearchResult(chosen, (candidate(2.0, layout=Z2), *([chosen] if chosen else ())), False)
    limits = []

    def faster_than(asked: Request, scorer: Any, most_s: float, most_gib: float) -> SearchResult | None:
        limits.append((asked.pins.offload_optimizer, most_s, most_gib))
        return SearchResult(quick, (quick,), False) if faster else None

    monkeypatch.setattr(search, "_faster_than", faster_than)
    assert search._or_on_host(request(pins, machines=machines), found) == (
        SearchResult(quick, (*found.considered, quick), True, ON_HOST, found.considered[0]) if taken else found
    )
    assert not taken or limits == [("cpu", pytest.approx(2.0), usable_gib(machines.gpu))]


def test_room_that_a_simpler_layout_lacks_is_said_also_where_it_is_as_fast() -> None:
    """0.6B on a card of 24 GB: plain torch fills 98 %, the plan offloads and takes 0.5 % longer."""
    recipe, _ = recipe_of_data(
        {"model": "qwen3-0.6b", "cluster": "1xRTX-4090", "job": {"objective": "sft"}}, [], "x", Path()
    )
    said = [api.plan(recipe, tight=tight).decisions for tight in (False, True)]
    roomy, tight = (next(each for each in made if each.rule == "memory_margin") for made in said)
    assert (roomy.chosen, tight.chosen) == ("8%", "none")
    assert "slower than what fills 98% of what is usable, which --tight takes" in roomy.why
    assert roomy.rejected[0].startswith("torch, dp=1, chunked loss")
