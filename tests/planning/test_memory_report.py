"""``kit memory``: the plan's own figures where it fits, the nearest miss and ways out where it does not."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kit.errors import KitError, PlanError
from kit.planner.explain.infeasible import changes_that_fit
from kit.planner.make_plan import make_plan, request_for
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.planner.search import can_fit, search
from kit.report.largest_model import SIZES, WAYS, largest_models, table
from kit.report.memory_report import FitReport, memory_report
from kit.report.memory_text import LOOKS, picture, save_png
from kit.specs.catalog import load_model
from kit.specs.job import LoraSpec
from kit.specs.layout import Pins
from kit.specs.strict_yaml import to_plain
from tests.planning.random_cases import random_request
from tests.support.models import cluster, job

MODEL = load_model("llama-3.1-8b")


def changes_of(request: Request) -> tuple[str, ...]:
    return changes_that_fit(request, search(request).considered)


def test_what_fits_is_what_a_plan_says() -> None:
    report = memory_report(Request(model=MODEL, cluster=cluster("8xH100"), job=job()))
    plan = make_plan(MODEL, cluster("8xH100"), job(), Pins())
    assert report.layout == plan.layout
    assert report.stages == plan.predicted.memory
    assert report.verdict in ("fits", "tight")
    assert report.changes == ()


def test_what_does_not_fit_is_shown_with_ways_out() -> None:
    pins = Pins(engine="deepspeed", zero_stage=0, offload_optimizer="none", offload_param="none")
    report = memory_report(Request(model=MODEL, cluster=cluster("8xH100"), job=job(), pins=pins))
    assert report.verdict == "does not fit"
    assert report.peak_gib > report.usable_gib
    assert any("zero_stage" in change for change in report.changes)
    assert report.binding == "optimizer"
    assert "it fits with" in picture(report).plain


def test_ways_out_come_cheapest_first() -> None:
    """A pin costs nothing, another training comes before shorter sequences, and those before hardware."""
    model, machines = load_model("llama-3-70b"), cluster("8xA100-40")
    found = list(changes_of(Request(model=model, cluster=machines, job=job())))
    assert found == [
        "--lora (or job.lora.four_bit=false): adapters trained instead of all weights",
        "job.global_batch_size=256 instead of 128",
        "job.seq_length=2048 instead of 4096",
        "cluster=dgx-a100-40:2 (16 GPUs) instead of 1",
        "cluster.gpu=A100-80 (79 GiB) instead of A100-40",  # and not the H100 of as many GiB
    ]
    long = job(seq_length=131072, global_batch_size=8)
    pinned = changes_of(Request(model=MODEL, cluster=cluster("8xH100"), job=long, pins=Pins(engine="torch", cp=1)))
    first = ["layout.engine", "layout.cp", "job.optimizer.name=adamw-8bit", "--lora", "job.global_batch_size=16"]
    assert [way.split()[0] for way in pinned] == first


def test_one_card_is_helped_by_its_machine_before_another_card() -> None:
    found = list(changes_of(Request(model=load_model("llama-2-7b"), cluster=cluster("1xRTX-4090"), job=job())))
    assert found[:4] == [
        "--lora (or job.lora.four_bit=false): adapters trained instead of all weights",
        "cluster.nvme_gib=101 for offload to disks, if that is what a node has",  # 16 bytes of 6.7B
        "cluster.host_ram_gib=168 instead of 128, for offload",
        "cluster.gpu=H200 (140 GiB) instead of RTX-4090",
    ]
    part = list(changes_of(Request(model=load_model("llama-3-70b"), cluster=cluster("1xL40S"), job=job())))
    assert part == [
        # in host memory
        "--qlora (or job.lora.four_bit=true): adapters on 4-bit weights trained instead of all weights",
        "cluster=4xL40S instead of 1",
    ]


def test_the_nearest_miss_may_be_of_host_memory() -> None:
    with pytest.raises(PlanError) as refused:
        make_plan(load_model("llama-3.1-405b"), cluster("8xH100"), job())
    nearest = str(refused.value).splitlines()[0]
    assert "optimizer on NVMe" in nearest
    assert re.search(r"\d+ GiB of host memory a node, \d+ of \d+ are usable: \d+ GiB too many$", nearest)


def test_each_stage_has_a_row_and_a_bar_of_its_components() -> None:
    report = memory_report(
        Request(model=MODEL, cluster=cluster("8xH100"), job=job(), pins=Pins(engine="megatron", pp=4))
    )
    lines = picture(report).plain.splitlines()
    bars = [line for line in lines if "|" in line and "usable" not in line]
    assert len(bars) == len(report.stages) == 4
    for bar, stage in zip(bars, report.stages, strict=True):
        for name, size in stage.components_gib.items():
            # 60 columns are the whole GPU; rounding moves each end by half a column at most.
            assert abs(bar[8:].count(LOOKS[name][0]) - 60 * size / report.memory_gib) <= 1
        assert bar[8 + round(60 * report.usable_gib / report.memory_gib)] == "|"


def test_a_node_with_too_little_host_memory_is_shown_not_only_refused() -> None:
    small = dataclasses.replace(cluster("8xH100"), host_ram_gib=512.0)
    pins = Pins(engine="deepspeed", zero_stage=3, offload_optimizer="cpu", offload_param="none")
    report = memory_report(Request(model=load_model("llama-3-70b"), cluster=small, job=job(), pins=pins))
    assert (report.verdict, report.binding) == ("does not fit", "host memory")
    assert report.host_ram_gib_per_node > 512
    assert f"host memory of a node: {report.host_ram_gib_per_node:.0f} of 512 GiB" in picture(report).plain
    assert any("offload_optimizer" in change for change in report.changes)


def test_a_picture_is_drawn_or_refused_by_name(tmp_path: Path) -> None:
    report = memory_report(
        Request(model=MODEL, cluster=cluster("8xH100"), job=job(), pins=Pins(engine="megatron", pp=4))
    )
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(KitError, match="pip install"):
            save_png(report, tmp_path / "bars.png")
        return
    save_png(report, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KitError, match="cannot be written"):
        save_png(report, tmp_path / "missing" / "bars.png")


def test_impossible_pins_list_every_rule() -> None:
    with pytest.raises(PlanError, match="num_attention_heads") as caught:
        memory_report(Request(model=MODEL, cluster=cluster("8xH100"), job=job(), pins=Pins(engine="megatron", tp=3)))
    assert len(str(caught.value).splitlines()) > 2


def test_the_command_prints_json() -> None:
    choices = ("tp=2", "pp=2", "recompute=full", "micro_batch_size=2", "zero_stage=1")
    sizes = ["--seq-length", "2048", *(f"layout.{choice}" for choice in choices)]
    words = [sys.executable, "-m", "kit", "memory", "llama-3.1-8b", "--gpus", "8xH100", *sizes, "--json"]
    printed = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    assert printed["peak_gib"] == pytest.approx(
        max(sum(size for name, size in stage.items() if name != "stage") for stage in printed["stages"])
    )
    assert printed["layout"].startswith("megatron, tp=2, pp=2")
    assert "full recompute, micro batch 2 x" in printed["layout"]


def test_the_sum_of_states_is_bytes_times_parameters() -> None:
    """16 bytes of DeepSpeed without accumulation; 18 of Megatron; the textbook's 16Ψ is 1,051 GiB of 70.6B."""
    large, machines = load_model("llama-3-70b"), cluster("64xA100-80")
    for pins, batch, said in (
        (Pins(engine="deepspeed", zero_stage=3, micro_batch_size=1), 64, "weights 2 + gradients 2 + optimizer 12 = 16"),
        (Pins(engine="megatron", tp=8, pp=4), 128, "weights 2 + gradients 4 + optimizer 12 = 18"),
    ):
        report = memory_report(Request(model=large, cluster=machines, job=job(global_batch_size=batch), pins=pins))
        line = report.reasons[0]
        assert said in line
        whole = float(re.findall(r"parameters = ([\d,]+) GiB", line)[0].replace(",", ""))
        assert whole == pytest.approx(int(said.split()[-1]) * 70.55e9 / 2**30, rel=0.001)
        assert "1,051 GiB" in line


def test_zero_3_is_compared_with_zero_2_by_the_figures_of_both() -> None:
    """A small model: what stage 3 gathers is more than it shards, and a smaller limit of live parameters mends it."""

    def reported(**sizes: int) -> FitReport:
        pins = Pins(engine="deepspeed", zero_stage=3, micro_batch_size=1, recompute="full", **sizes)  # type: ignore[arg-type]
        small = load_model("llama-3.2-1b")
        return memory_report(Request(model=small, cluster=cluster("8xH100"), job=job(global_batch_size=8), pins=pins))

    report = reported()
    line = next(line for line in report.reasons if line.startswith("ZeRO-3 instead of ZeRO-2"))
    two, three = map(float, re.findall(r"peak ([\d.]+) -> ([\d.]+)", line)[0])
    assert three == pytest.approx(report.peak_gib, abs=0.05)
    pins = Pins(engine="deepspeed", zero_stage=2, micro_batch_size=1, recompute="full")
    small = load_model("llama-3.2-1b")
    second = memory_report(Request(model=small, cluster=cluster("8xH100"), job=job(global_batch_size=8), pins=pins))
    assert two == pytest.approx(second.peak_gib, abs=0.05)
    assert ("more than sharding saves" in line) == (three > two)
    assert reported(stage3_max_live_parameters=100_000_000).peak_gib < report.peak_gib


def test_selective_recompute_and_loading_are_explained() -> None:
    pins = Pins(engine="deepspeed", zero_stage=3)
    report = memory_report(Request(model=MODEL, cluster=cluster("8xH100"), job=job(), pins=pins))
    assert report.layout.implementation == "huggingface"  # what the Trainer runs, and no layers of Megatron
    recompute, loading = report.reasons[-2:]
    kept = {kind: float(size) for kind, size in re.findall(r"(none|selective|full) (\d+\.\d)", recompute)}
    assert kept["full"] < 0.5 * kept["selective"] < 0.5 * kept["none"] + 0.1
    assert "never stores them" in recompute
    assert "8 x 15 = 120 GiB" in loading  # 2 bytes of 8.03B on each of 8 processes


def test_the_largest_model_of_a_machine() -> None:
    """Each figure is the plan's own, and the next size does not fit."""
    found = largest_models(cluster("1xRTX-4090"), job(), Pins())
    chosen = [found.largest(way) for way in WAYS]
    assert [SIZES.index(name) for name in chosen if name] == sorted(SIZES.index(name) for name in chosen if name)
    for (way, lora), name in zip(WAYS.items(), chosen, strict=True):
        assert name is not None
        own = dataclasses.replace(job(), lora=lora)
        plan = make_plan(load_model(name), found.cluster, own)
        assert found.needs[name, way].peak_gib == pytest.approx(plan.predicted.peak_gib)
        with pytest.raises(PlanError):
            make_plan(load_model(SIZES[SIZES.index(name) + 1]), found.cluster, own)
        assert f"largest, {way}: {name}: " in table(found)


def kit(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kit", *words], check=False, capture_output=True, text=True)


def test_the_exit_code_says_whether_it_fits() -> None:
    done = kit("memory", "llama-3-70b", "--gpus", "8xH100", "--engine", "deepspeed", "layout.zero_stage=1")
    assert done.returncode == 1
    assert "does not fit" in done.stdout
    assert "over megatron" not in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("layout.tp=8", "layout.tp=4"), "tp=8 and layout.tp=4"),
        (("layout.zero_stage=2", "layout.zero_stage=3"), "zero_stage=2 and layout.zero_stage=3"),
    ],
)
def test_two_values_of_one_choice_are_refused(words: tuple[str, ...], said: str) -> None:
    done = kit("memory", "llama-3.1-8b", "--gpus", "8xH100", *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_plan_file_stands_wherever_a_recipe_does(tmp_path: Path) -> None:
    plan = make_plan(MODEL, cluster("8xH100"), job(), Pins(engine="deepspeed", zero_stage=3))
    plan.save(tmp_path / "plan.yaml")
    file = str(tmp_path / "plan.yaml")
    report = json.loads(kit("memory", file, "--json").stdout)
    assert report["peak_gib"] == pytest.approx(plan.predicted.peak_gib)
    shown = json.loads(kit("plan", file, "--json").stdout)
    assert shown == json.loads(kit("explain", file, "--json").stdout)["plan"] == to_plain(plan)
    data = f"run.data={{train: {tmp_path / 'data'}}}"
    emitted = kit("emit", file, data, "--out", str(tmp_path / "run"))
    assert emitted.returncode == 0, emitted.stderr
    assert Plan.load(tmp_path / "run" / "plan.yaml").layout == plan.layout
    refused = kit("memory", file, "job.seq_length=512")
    assert refused.returncode == 2
    assert "a plan has every choice made" in refused.stderr


def test_an_engine_that_is_named_as_a_way_out_can_do_it() -> None:
    pins = Pins(engine="torch", ep=3)
    with pytest.raises(PlanError, match="engine=megatron would refuse it too: ep=3 does not divide num_experts=8"):
        make_plan(load_model("mixtral-8x7b"), cluster("8xH100"), job(), pins)


@pytest.mark.parametrize(
    ("model", "gpus", "lora", "first"),
    [
        (
            "llama-3.1-8b",
            "1xRTX-4090",
            None,
            "--lora (or job.lora.four_bit=false): adapters trained instead of all weights",
        ),
        (
            "qwen3-30b-a3b",
            "1xA100-40",
            None,
            "--lora (or job.lora.four_bit=false): adapters trained instead of all weights",
        ),
        (
            "mixtral-8x7b",
            "1xA100-80",
            LoraSpec(four_bit=True),
            "--lora (or job.lora.four_bit=false): adapters instead of adapters on 4-bit weights",
        ),
        (
            "llama-3-70b",
            "1xH100",
            LoraSpec(),
            "--qlora (or job.lora.four_bit=true): adapters on 4-bit weights instead of adapters",
        ),
    ],
)
def test_adapters_of_either_kind_are_proposed(model: str, gpus: str, lora: LoraSpec | None, first: str) -> None:
    """Experts have no 4-bit weights (bitsandbytes replaces linear layers), and ZeRO-3 offloads 16-bit ones."""
    request = request_for(load_model(model), cluster(gpus), job(lora=lora))
    if lora is not None and not lora.four_bit:
        request = replace(request, cluster=replace(request.cluster, host_ram_gib=32.0))
    found = changes_of(request)
    assert found[0] == first
    wanted = LoraSpec(four_bit=first.startswith("--qlora"))
    assert make_plan(request.model, request.cluster, job(lora=wanted)).layout.dp == 1


def test_the_memory_that_is_proposed_is_the_least_that_does() -> None:
    pins = Pins(engine="deepspeed", zero_stage=3, offload_optimizer="cpu")
    machines = cluster("8xA100-40")
    found = changes_of(Request(model=load_model("llama-3-70b"), cluster=machines, job=job(), pins=pins))
    assert "cluster.host_ram_gib=1753 instead of 953, for offload" in found
    for gib, fits in ((1753.0, True), (1752.0, False)):
        more = replace(machines, host_ram_gib=gib)
        asked = Request(model=load_model("llama-3-70b"), cluster=more, job=job(), pins=pins)
        assert can_fit(asked) == fits


_TYPED = re.compile(r"(?P<key>job|cluster|layout)\.(?P<name>\w+)(=(?P<value>\d+) instead| left to the planner)")


def test_what_a_refusal_proposes_really_plans() -> None:
    """Numbers and pins that can be typed, on random questions without an answer."""
    tried = 0
    for seed in range(40):
        request = random_request(seed)
        if (result := search(request)).best is not None:
            continue
        for change in changes_that_fit(request, result.considered):
            pins, work, machines = request.pins, request.job, request.cluster
            if found := _TYPED.match(change):
                owner = {"job": work, "cluster": machines}.get(found["key"], pins)
                value = found["value"] and type(getattr(owner, found["name"]))(found["value"])
                changed = {"job": work, "cluster": machines, "layout": pins} | {
                    found["key"]: replace(owner, **{found["name"]: value})
                }
                make_plan(request.model, changed["cluster"], changed["job"], changed["layout"])
            elif found := re.match(r"--(q?)lora", change):
                lora = replace(work.lora or LoraSpec(), four_bit=bool(found[1]))
                make_plan(request.model, machines, replace(work, lora=lora), pins)
            else:
                continue
            tried += 1
    assert tried > 5
