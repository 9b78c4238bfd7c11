"""``kit memory``: the plan's own figures where it fits, the nearest miss and ways out where it does not."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.errors import PlanError
from kit.planner.explain.infeasible import changes_that_fit
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.planner.search import can_fit, search
from kit.report.largest_model import SIZES, WAYS, largest_models, table
from kit.report.memory_report import FitReport, memory_report
from kit.report.memory_text import picture
from kit.specs.catalog import load_model
from kit.specs.job import LoraSpec
from kit.specs.layout import Pins
from kit.specs.strict_yaml import to_plain
from tests.planning.random_cases import random_request
from tests.support.files import file_with
from tests.support.in_process import kit_main, kit_refusal
from tests.support.models import cluster, job
from tests.support.refusals import refusal

MODEL, LARGE, SMALL = map(load_model, ("llama-3.1-8b", "llama-3-70b", "llama-3.2-1b"))


def changes_of(request: Request) -> list[str]:
    return list(changes_that_fit(request, search(request).considered))


def report_on(gpus: str, model: Any = MODEL, of: dict[str, Any] | None = None, **pins: Any) -> FitReport:
    return memory_report(Request(model=model, cluster=cluster(gpus), job=job(**(of or {})), pins=Pins(**pins)))


def test_what_fits_is_what_a_plan_says() -> None:
    report = report_on("8xH100")
    plan = make_plan(MODEL, cluster("8xH100"), job(), Pins())
    assert (report.layout, report.stages, report.changes) == (plan.layout, plan.predicted.memory, ())
    assert report.verdict in ("fits", "tight")
    assert (report.model, report.cluster, report.job) == (MODEL, plan.cluster, job())


@pytest.mark.parametrize(
    ("gib", "model", "pins", "binding", "way"),
    [
        (2000.0, MODEL, {"zero_stage": 0, "offload_optimizer": "none"}, "optimizer", "zero_stage"),
        (512.0, LARGE, {"zero_stage": 3, "offload_optimizer": "cpu"}, "host memory", "offload_optimizer"),
    ],
)
def test_what_does_not_fit_is_shown_with_ways_out(
    gib: float, model: Any, pins: dict[str, Any], binding: str, way: str
) -> None:
    node = dataclasses.replace(cluster("8xH100"), host_ram_gib=gib)
    pinned = Pins(engine="deepspeed", offload_param="none", **pins)
    report = memory_report(Request(model=model, cluster=node, job=job(), pins=pinned))
    assert (report.verdict, report.binding) == ("does not fit", binding)
    assert any(way in change for change in report.changes)
    shown = f"host memory of a node: {report.host_ram_gib_per_node:.0f} of 512 GiB" in picture(report).plain
    assert (report.peak_gib > report.usable_gib, shown) == (binding == "optimizer", binding == "host memory")


LORA = "--lora (or job.lora.four_bit=false): adapters trained instead of all weights"


@pytest.mark.parametrize(
    ("model", "gpus", "of", "pins", "ways"),
    [
        ("llama-3-70b", "8xA100-40", {}, Pins(), [
            LORA,
            "job.global_batch_size=256 instead of 128",
            "job.seq_length=2048 instead of 4096",
            "cluster=dgx-a100-40:2 (16 GPUs) instead of 1",
            "cluster.gpu=A100-80 (79 GiB) instead of A100-40",  # and not the H100 of as many GiB
        ]),
        ("llama-3.1-8b", "8xH100", {"seq_length": 131072, "global_batch_size": 8}, Pins(engine="torch", cp=1), [
            "layout.engine", "layout.cp", "job.optimizer.name=adamw-8bit", "--lora", "job.global_batch_size=16",
        ]),
        ("llama-2-7b", "1xRTX-4090", {}, Pins(), [
            LORA,
            "cluster.nvme_gib=101 for offload to disks, if that is what a node has",  # 16 bytes of 6.7B
            "cluster.host_ram_gib=168 instead of 128, for offload",
            "cluster.gpu=H200 (140 GiB) instead of RTX-4090",
            "",
        ]),
        ("llama-3-70b", "1xL40S", {}, Pins(), [
            # in host memory
            "--qlora (or job.lora.four_bit=true): adapters on 4-bit weights trained instead of all weights",
            "cluster=4xL40S instead of 1",
        ]),
    ],
)  # fmt: skip
def test_ways_out_come_cheapest_first(model: str, gpus: str, of: dict[str, int], pins: Pins, ways: list[str]) -> None:
    """A pin costs nothing, another training comes before shorter sequences, and those before hardware; one card is
    helped by its machine before another card."""
    found = changes_of(Request(model=load_model(model), cluster=cluster(gpus), job=job(**of), pins=pins))
    assert len(found) == len(ways)
    assert [way[: len(begin)] for way, begin in zip(found, ways, strict=True)] == ways


def test_the_nearest_miss_may_be_of_host_memory() -> None:
    nearest = refusal(PlanError, make_plan, load_model("llama-3.1-405b"), cluster("8xH100"), job()).splitlines()[0]
    assert "optimizer on NVMe" in nearest
    assert re.search(r"\d+ GiB of host memory a node, \d+ of \d+ are usable: \d+ GiB too many$", nearest)


def test_what_another_engine_would_refuse_too_is_said() -> None:
    assert "engine=torch would refuse it too: ep=3 does not divide num_experts=8" in refusal(
        PlanError, make_plan, load_model("mixtral-8x7b"), cluster("8xH100"), job(), Pins(engine="deepspeed", ep=3)
    )


TABLE = 128_256 * 8192
STAGE = (70_553_706_496 - 2 * TABLE - 8192) / 4 + TABLE
"""Parameters of the first of four stages: a fourth of the layers, and the embedding. Half of its optimizer state is on
each of two replicas."""


@pytest.mark.parametrize(
    ("pins", "of", "said", "held", "more"),
    [
        # 16 bytes of DeepSpeed without accumulation, 18 of Megatron; the textbook's 16Ψ is 1,051 GiB of 70.6B.
        ({"engine": "deepspeed", "zero_stage": 3}, {"global_batch_size": 64}, (2, 2, 12), 1051 / 64, None),
        ({"engine": "megatron", "tp": 8, "pp": 4}, {}, (2, 4, 12), 12 * STAGE / 8 / 2**30,
         "16 bytes (1,051 GiB) is the sum with gradients in bf16; here they are summed in fp32"),
        # 80 layers in stages of 21, 21, 21 and 17.
        ({"engine": "megatron", "tp": 8, "pp": 4, "last_stage_layers": 17}, {}, (2, 4, 12),
         12 * (21 * (STAGE - TABLE) / 20 + TABLE) / 8 / 2**30, "16 bytes (1,051 GiB)"),
        # 17, 21, 21 and 21, of which the second is the fullest.
        ({"engine": "megatron", "tp": 8, "pp": 4, "first_stage_layers": 17}, {}, (2, 4, 12),
         12 * 21 * (STAGE - TABLE) / 20 / 8 / 2**30, "16 bytes (1,051 GiB)"),
        ({"engine": "deepspeed", "zero_stage": 3}, {"global_batch_size": 64, "precision": "fp32"}, (4, 4, 12),
         1314 / 64, None),
    ],
)  # fmt: skip
def test_the_sum_of_states_is_bytes_times_parameters(
    pins: dict[str, Any], of: dict[str, Any], said: tuple[int, ...], held: float, more: str | None
) -> None:
    line = next(
        line for line in report_on("64xA100-80", LARGE, of, micro_batch_size=1, **pins).reasons if "states" in line
    )
    assert "states: weights {} + gradients {} + optimizer {} = ".format(*said) in line
    assert f"= {sum(said)} bytes x 70.6B parameters = {sum(said) * 70.553706496e9 / 2**30:,.0f} GiB; " in line
    assert f"a GPU holds {held:.1f} GiB" in line
    assert (more or "gradients in bf16") in line if more else "gradients in bf16" not in line


def test_frozen_weights_have_no_optimizer_state() -> None:
    report = report_on("8xH100", of={"lora": LoraSpec()}, engine="torch", zero_stage=0)
    assert "states: weights 2" in report.reasons[0]
    assert report.reasons[0].endswith("Weights are frozen: the adapters alone have gradients and optimizer state")


def test_zero_3_is_compared_with_zero_2_by_the_figures_of_both() -> None:
    """A small model: what stage 3 gathers is more than it shards, and a smaller limit of live parameters mends it."""
    asked: dict[str, Any] = {
        "engine": "deepspeed",
        "micro_batch_size": 1,
        "recompute": "full",
        "of": {"global_batch_size": 8},
    }
    second, report = (report_on("8xH100", SMALL, zero_stage=stage, **asked) for stage in (2, 3))
    less = report_on("8xH100", SMALL, zero_stage=3, stage3_max_live_parameters=100_000_000, **asked)
    split = report_on("8xH100", SMALL, zero_stage=3, cp=8, **asked)
    assert sum("instead of ZeRO-2" in line for line in split.reasons) == 1  # over ranks of one sample too
    for each in (report, second, less):
        (line,) = (line for line in each.reasons if line.startswith("ZeRO-3 instead of ZeRO-2"))
        two, three = map(float, re.findall(r"peak ([\d.]+) -> ([\d.]+)", line)[0])
        assert two == pytest.approx(second.peak_gib, abs=0.05)
        assert three == pytest.approx((less if each is less else report).peak_gib, abs=0.05)
        assert ("more than sharding saves" in line) == (three > two)
        weights = [each.stages[0].components_gib["weights"] for each in (second, report)]
        assert "(weights {:.1f} -> {:.1f}, buffers ".format(*weights) in line
    assert "100M live parameters" in line
    assert less.peak_gib < report.peak_gib
    alone = report_on("1xH100", SMALL, zero_stage=3, **asked)
    stage_1 = report_on("8xH100", SMALL, zero_stage=1, **asked)
    fsdp = report_on("8xH100", SMALL, **{**asked, "engine": "torch"}, zero_stage=3)
    assert not any("instead of ZeRO-2" in line for each in (alone, stage_1, fsdp) for line in each.reasons)


def kept(said: str) -> dict[str, float]:
    """GiB of saved tensors by kind of recompute."""
    return {kind: float(size) for kind, size in re.findall(r"(none|selective|full) (\d+\.\d)", said)}


def test_what_recompute_would_save_is_told_of_layers_that_can() -> None:
    """transformers' layers have no selective recompute where attention is fused."""
    on_zero, on_torch, unfused = (
        report_on("8xH100", model, **pins).reasons
        for model, pins in (
            (MODEL, {"engine": "deepspeed", "zero_stage": 3}),
            (MODEL, {"engine": "torch", "zero_stage": 3, "compile_layers": False}),
            (load_model("gemma-2-2b"), {"engine": "deepspeed", "zero_stage": 2}),
        )
    )
    assert (kept(on_zero[-2]).keys(), "never stores them" in on_zero[-2]) == ({"none", "full"}, False)
    found = kept(on_torch[-1])
    assert found["full"] < 0.3 * found["selective"] < 0.15 * found["none"]
    assert "never stores them" in report_on("8xH100", engine="megatron", tp=2).reasons[-1]
    assert "never stores them" not in unfused[-1]


def test_what_loading_takes_of_a_node_is_told_of_zero_3() -> None:
    """2 bytes of 8.03B on each of the 8 processes of one node."""
    zero: dict[str, Any] = {"engine": "deepspeed", "zero_stage": 3}
    one = report_on("8xH100", **zero).reasons[-1]
    two = report_on("16xH100", **zero, offload_optimizer="cpu", offload_param="cpu").reasons[-1]
    for said, included in ((one, False), (two, True)):
        assert "8 x 15 = 120 GiB at 2 bytes a parameter" in said
        assert ("a node, offloaded state included; without it" in said) == included
    assert [
        line
        for pins in (zero | {"zero_stage": 2}, zero | {"implementation": "local", "tp": 2})
        for line in report_on("8xH100", **pins).reasons
        if "loading" in line
    ] == []


@pytest.mark.slow
def test_the_largest_model_of_a_machine() -> None:
    """Each figure is the plan's own, and the next size does not fit."""
    found = largest_models(cluster("1xRTX-4090"), job(), Pins())
    chosen = {each.way: each for each in found}
    assert [SIZES.index(chosen[way].model) for way in WAYS] == sorted(
        SIZES.index(each.model) for each in chosen.values()
    )
    for way, largest in chosen.items():
        own = dataclasses.replace(job(), lora=WAYS[way])
        plan = make_plan(load_model(largest.model), cluster("1xRTX-4090"), own)
        assert largest.peak_gib == pytest.approx(plan.predicted.peak_gib)
        with pytest.raises(PlanError):
            make_plan(load_model(SIZES[SIZES.index(largest.model) + 1]), cluster("1xRTX-4090"), own)
        assert f"largest, {way}: {largest.model}: " in table(cluster("1xRTX-4090"), job(), found)
    assert "no model of qwen2.5-0.5b or larger fits on 1 x RTX-4090" in refusal(
        PlanError, largest_models, cluster("1xRTX-4090"), job(), Pins(tp=7)
    )


def test_the_exit_code_says_whether_it_fits() -> None:
    done = kit_main("memory", "llama-3-70b", "--gpus", "8xH100", "--engine", "deepspeed", "layout.zero_stage=1")
    assert (done.code, "does not fit" in done.out, "over megatron" in done.out) == (1, True, False)
    assert kit_main("memory", "llama-3.2-1b", "--gpus", "8xH100").code == 0


@pytest.mark.slow
def test_a_plan_file_stands_wherever_a_recipe_does(tmp_path: Path) -> None:
    plan = make_plan(MODEL, cluster("8xH100"), job(), Pins(engine="deepspeed", zero_stage=3))
    plan.save(tmp_path / "plan.yaml")
    file = str(tmp_path / "plan.yaml")
    assert json.loads(kit_main("memory", file, "--json").out)["peak_gib"] == pytest.approx(plan.predicted.peak_gib)
    printed = file_with(tmp_path / "plan.json", kit_main("plan", file, "--json").out)
    assert json.loads(kit_main("explain", str(printed), "--json").out)["plan"] == to_plain(plan)
    assert kit_main("emit", file, f"run.data={{train: {tmp_path / 'data'}}}", "--out", str(tmp_path / "run")).code == 0
    assert Plan.load(tmp_path / "run" / "plan.yaml").layout == plan.layout
    assert "a plan has every choice made" in kit_refusal(["memory", file, "job.seq_length=512"])


QLORA = "--qlora (or job.lora.four_bit=true): adapters on 4-bit weights instead of adapters"


@pytest.mark.parametrize(
    ("model", "gpus", "lora", "first"),
    [
        ("llama-3.1-8b", "1xRTX-4090", None, LORA),
        ("qwen3-30b-a3b", "1xA100-40", None, LORA),
        ("mixtral-8x7b", "1xA100-80", LoraSpec(four_bit=True), LORA.replace("trained instead of all weights",
         "instead of")),
        ("llama-3-70b", "1xH100", LoraSpec(), QLORA),
    ],
)  # fmt: skip
def test_adapters_of_either_kind_are_proposed(model: str, gpus: str, lora: LoraSpec | None, first: str) -> None:
    """Experts have no 4-bit weights (bitsandbytes replaces linear layers), and ZeRO-3 offloads 16-bit ones."""
    request = Request(model=load_model(model), cluster=cluster(gpus), job=job(lora=lora))
    if lora is not None and not lora.four_bit:
        request = replace(request, cluster=replace(request.cluster, host_ram_gib=32.0))
    assert changes_of(request)[0].startswith(first)
    wanted = LoraSpec(four_bit=first.startswith("--qlora"))
    assert make_plan(request.model, request.cluster, job(lora=wanted)).layout.dp == 1


def test_the_memory_that_is_proposed_is_the_least_that_does() -> None:
    asked = Request(model=LARGE, cluster=cluster("8xA100-40"), job=job(), pins=Pins(
        engine="deepspeed", zero_stage=3, offload_optimizer="cpu"))  # fmt: skip
    assert "cluster.host_ram_gib=1753 instead of 953, for offload" in changes_of(asked)
    assert [can_fit(replace(asked, cluster=replace(asked.cluster, host_ram_gib=gib))) for gib in (1753.0, 1752.0)] == [
        True,
        False,
    ]


_TYPED = re.compile(r"(?P<key>job|cluster|layout)\.(?P<name>\w+)(=(?P<value>\d+) instead| left to the planner)")


@pytest.mark.everyday("16 questions")
@pytest.mark.parametrize("seeds", [range(16), range(16, 40)], ids=["16 questions", "24 more"])
@pytest.mark.slow
def test_what_a_refusal_proposes_really_plans(seeds: range) -> None:
    """Numbers and pins that can be typed, on random questions without an answer."""
    tried = 0
    for seed in seeds:
        request = random_request(seed)
        if can_fit(request):
            continue
        for change in changes_that_fit(request, search(request).considered):
            changed: dict[str, Any] = {"job": request.job, "cluster": request.cluster, "layout": request.pins}
            if found := _TYPED.match(change):
                owner = changed[found["key"]]
                value = found["value"] and type(getattr(owner, found["name"]))(found["value"])
                changed[found["key"]] = replace(owner, **{found["name"]: value})
            elif found := re.match(r"--(q?)lora", change):
                lora = replace(request.job.lora or LoraSpec(), four_bit=bool(found[1]))
                changed["job"] = replace(request.job, lora=lora)
            else:
                continue
            make_plan(request.model, changed["cluster"], changed["job"], changed["layout"])
            tried += 1
    assert tried > 2
