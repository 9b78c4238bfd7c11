"""Layouts that people quote come out when they are pinned, or the planner says why they do not and what helps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kit.errors import PlanError
from kit.planner.make_plan import make_plan
from kit.report.bottlenecks import bottlenecks
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from tests.planning.questions import planned
from tests.support.refusals import refusal

OF_7B = {"engine": "deepspeed", "implementation": "huggingface"}
QUOTED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "1B on one GPU is plain torch with autocast": (
        "tinyllama-1.1b", "1xA100-40", {}, {"seq_length": 2048, "global_batch_size": 64}, {"engine": "torch",
        "zero_stage": 0}),
    "7B by ZeRO-2": ("llama-2-7b", "8xA100-80", {**OF_7B, "zero_stage": 2}, {"global_batch_size": 64}, {"dp": 8}),
    "7B by ZeRO-3": ("llama-2-7b", "8xA100-80", {**OF_7B, "zero_stage": 3}, {"global_batch_size": 64}, {"dp": 8}),
    "GPT-2 XL on 24 GB by ZeRO-3 with the optimizer on the host": (
        "gpt2-xl", "1xTitan-RTX", {"engine": "deepspeed", "zero_stage": 3, "offload_optimizer": "cpu",
        "offload_param": "cpu"},
        {"seq_length": 128, "global_batch_size": 16, "precision": "fp32"}, {"offload_optimizer": "cpu"}),
    **{f"{name} in three dimensions on {machines}": (
        name, machines, {"engine": "megatron", "tp": 8, "pp": pp}, {"seq_length": 2048, "global_batch_size": batch},
        {"dp": dp})
       for name, machines, pp, dp, batch in (
           ("llama-3-70b", "512xA100-80", 4, 16, 1024), ("llama-65b", "1024xA100-80", 8, 16, 2048),
           ("llama-3-70b", "800xA100-80", 4, 25, 2000))},
}  # fmt: skip


@pytest.mark.parametrize("case", QUOTED)
def test_a_layout_as_quoted(case: str) -> None:
    name, machines, pins, job, expected = QUOTED[case]
    plan = planned(name, machines, Pins(**pins), **job)
    assert {key: getattr(plan.layout, key) for key in expected} == expected
    assert (plan.predicted.step_time_components_s.get("offload", 0) > 0) == ("offload_optimizer" in pins)
    assert bottlenecks(plan)[0].what == "compute" or "dimensions" not in case


QUOTED_70B = Pins(engine="megatron", tp=8, pp=2, micro_batch_size=1)


def test_70b_on_64_a100_of_40_gb_does_not_fit_as_quoted_and_what_does_is_named() -> None:
    pins = QUOTED_70B.but(recompute="none")
    refused = refusal(PlanError, planned, "llama-3-70b", "p4d.24xlarge:8", pins.but(offload_optimizer="none"))
    first, *ways = refused.splitlines()
    assert ("GiB too many" in first, len(ways)) == (True, 5)
    assert [
        way
        for way in (
            "layout.pp left to the planner instead of 2",
            "offload_optimizer left to the planner instead of none",
        )
        if not any(way in said for said in ways)
    ] == []
    assert "it is not needed with layout.pp left to the planner instead of 2" in next(
        each.why for each in planned("llama-3-70b", "p4d.24xlarge:8", pins).decisions if each.rule == "last_resort"
    )
    assert planned("llama-3-70b", "p4d.24xlarge:8", Pins(engine="megatron", tp=8)).layout.pp > 2
    assert planned("llama-3-70b", "p4de.24xlarge:8", QUOTED_70B).layout.dp == 4


@pytest.mark.parametrize(
    ("name", "nodes", "quoted"),
    [
        ("qwen3-235b-a22b", 4, Pins(tp=4, pp=8, ep=4, last_stage_layers=10)),
        ("deepseek-v3", 12, Pins(tp=8, pp=12, ep=8, last_stage_layers=6)),
    ],
)
def test_megatrons_optimizer_on_the_host_as_in_verl(name: str, nodes: int, quoted: Pins) -> None:
    """verl, docs/perf/dpsk.md: with OFFLOAD_FRACTION=1 these fit on 32 and on 96 H20, with 1.6 TB of host memory. Its
    DeepSeek-V3 took 66 GB of a GPU at sequences of up to 11,680 tokens."""
    h20 = dataclasses.replace(parse_cluster(f"{nodes}x8xH20"), host_ram_gib=1.6e12 / 2**30)
    for pins in (Pins(), quoted):
        asked = dataclasses.replace(pins, engine="megatron", offload_optimizer="cpu")
        assert make_plan(load_model(name), h20, JobSpec(), asked).predicted.step_time_components_s["offload"] > 0
    assert "GiB too many" in refusal(
        PlanError, make_plan, load_model(name), h20, JobSpec(), dataclasses.replace(asked, offload_optimizer="none")
    )
    if name == "deepseek-v3":
        full = dataclasses.replace(asked, recompute="full", micro_batch_size=1)
        published = make_plan(load_model(name), h20, JobSpec(seq_length=11680, global_batch_size=32), full)
        assert published.predicted.peak_gib * 2**30 / 1e9 == pytest.approx(66, rel=0.15)
