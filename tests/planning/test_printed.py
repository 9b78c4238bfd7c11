"""What is printed of a plan whose figures are round: every number and word that follows from them, by hand."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest

from kit.cost.estimate import Prediction
from kit.cost.memory.peak import MemoryReport, StageMemory
from kit.cost.reliability import Operation
from kit.planner.compare import ComparedLayout
from kit.planner.plan import Alternative, Decision, Plan
from kit.planner.request import Request
from kit.report import html
from kit.report.clusters import ClusterAnswer, cluster_table
from kit.report.largest_model import _fitting, table
from kit.report.memory_report import FitReport
from kit.report.memory_text import picture
from kit.report.pipeline_schedule import timeline
from kit.report.summary import summary
from kit.report.view import money, spoken, view_of
from kit.report.what_if import WhatIf, explain
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec
from kit.specs.layout import Layout, Pins, describe
from kit.specs.strict_yaml import to_plain
from kit.units import human_count, human_seconds

Changes = dict[str, Any]
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
H100 = dataclasses.replace(parse_cluster("8xH100").gpu, memory_gib=100.0)  # 95 are usable
CLUSTER = dataclasses.replace(
    parse_cluster("p5.48xlarge:2"), gpu=H100, price_per_node_hour_usd=25.0, price_date="2026-01-31", host_ram_gib=2000.0
)


def stage(number: int, *gib: float) -> StageMemory:
    return StageMemory(stage=number, components_gib=dict(zip(PARTS, gib, strict=True)))


OPERATION = Operation(
    checkpoint_gb=112.0, checkpoint_s=30.0, checkpoint_interval_s=3600.0, hours_between_failures=48.0, goodput=0.8,
    data_mbytes_per_s=0.84, checkpoint_usd_per_month=2.58,
)  # fmt: skip
PREDICTED = Prediction(
    memory=(stage(0, 10.0, 5.0, 20.0, 4.0, 0.04, 1.0, 2.0), stage(1, 9.0, 5.0, 18.0, 2.0, 6.0, 1.0, 2.0)),
    host_ram_gib_per_node=0.0, step_time_s=10.0, tokens_per_s=209_715.2, mfu=0.4, bubble_fraction=0.125,
    step_time_components_s={
        "compute": 6.0, "tensor_parallel": 2.0, "data_parallel": 1.5, "pipeline_bubble": 0.495, "optimizer": 0.005,
        "offload": 0.0,
    },
    days=5.0,  # 43,200 steps of 2,097,152 tokens: 90.6B
    cost_usd=6000.0, operation=OPERATION,
)  # fmt: skip
DECISIONS = (
    Decision(rule="engine", chosen="megatron", why="fastest", rejected=(
        "deepspeed, tp=2, dp=8, ZeRO-3, vp=2, micro batch 1 x 64: +12.5%, 40 GiB", "torch: refused")),
    Decision(rule="tp", chosen="2", why="pinned"),
    Decision(rule="seq_length", chosen="4096", why="of the model"),
)  # fmt: skip
BESIDE = (Alternative(layout="deepspeed, tp=2, dp=8, ZeRO-3, vp=2, micro batch 1 x 64", step_time_s=11.25),)


def plan(
    layout: Changes | None = None, predicted: Changes | None = None, cluster: Changes | None = None,
    decisions: tuple[Decision, ...] = (), alternatives: tuple[Alternative, ...] = (), **job: Any,
) -> Plan:  # fmt: skip
    sizes = {"tp": 2, "pp": 2, "dp": 4, "zero_stage": 1, "gradient_accumulation_steps": 128, **(layout or {})}
    return Plan(
        model=load_model("llama-3.1-8b"),
        cluster=dataclasses.replace(CLUSTER, **(cluster or {})),
        job=JobSpec(**{"seq_length": 4096, "global_batch_size": 512, **job}),
        layout=Layout(engine="megatron", implementation="local", **sizes),
        predicted=dataclasses.replace(PREDICTED, **(predicted or {})),
        decisions=decisions,
        alternatives=alternatives,
    )


def test_the_first_screen() -> None:
    view = view_of(plan(decisions=DECISIONS, alternatives=BESIDE))
    assert summary(view, ("kit emit", "kit explain"), 130, str.upper).splitlines() == [
        "llama-3.1-8b · 8.03B parameters · pretraining · 16 × H100 (2 × p5.48xlarge) · bf16 · 4,096 tokens · "
        "512 sequences a step",
        "",
        "  LAYOUT    Megatron-core TP 2 · PP 2 · DP 4, distributed optimizer · micro-batch 1 × 128",
        "  MEMORY    ████████████░░░░░░░░░░░░░░░· 43.0 of 95.0 GiB usable (100.0 total; not measured yet)",
        "  TIME      10 s a step (no published run to compare with) · 210k tokens/s · MFU 40.0%",
        "  LENGTH    43,200 steps: 6.25 days with checkpoints and failures · $7,500 at $25.00 a node and hour, "
        "2026-01-31",
        "  ALSO      DeepSpeed TP 2 ZeRO-3 +12.5%",
        "  NOTE      seq_length=4096: of the model",
        "  NEXT      kit emit",
        "            kit explain",
    ]  # fmt: skip
    narrow = summary(view_of(plan()), width=60).splitlines()
    assert narrow[1] == "  × p5.48xlarge) · bf16 · 4,096 tokens · 512 sequences a"
    assert narrow[5] == "            optimizer · micro-batch 1 × 128"
    assert "also" not in " ".join(narrow)


@pytest.mark.parametrize("width", range(50, 90, 3))
def test_lines_end_between_words(width: int) -> None:
    """``micro-batch`` is one word."""
    assert summary(view_of(plan()), width=width).split() == summary(view_of(plan()), width=1000).split()


def explanation(of: Plan) -> str:
    """Without what the planner would choose alone."""
    return str(explain(of)).split("\n\nleft to the planner")[0]


def test_an_explained_plan() -> None:
    assert (
        explanation(plan(decisions=(*DECISIONS, dataclasses.replace(DECISIONS[0], rejected=("a", "b", "c")))))
        == """llama-3.1-8b, 8.03B parameters, on 16 x H100 (2 x p5.48xlarge)
pretraining, bf16, sequences of 4096, 512 a step (2.1M tokens), 43,200 steps

  megatron, tp=2, pp=2, dp=4, distributed optimizer, micro batch 1 x 128

peak memory per GPU: 43.0 GiB of 95.0 usable (100.0 total); prediction not validated by measurements
               weights   gradients   optimizer activations      logits     buffers    overhead        peak
  stage 0         10.0         5.0        20.0         4.0         0.0         1.0         2.0        42.0
  stage 1          9.0         5.0        18.0         2.0         6.0         1.0         2.0        43.0

step 10 s (predicted; not validated by measurements)
  compute 6 s + tensor parallel 2 s + data parallel 1.5 s + pipeline bubble 495 ms
210k tokens/s, 13.1k a GPU; MFU 40.0%; bubble 12.5%
5 days for 43,200 steps; $6,000 at $25.00 a node and hour, 2026-01-31
data loading: 0.84 MB/s of tokens
checkpoint 112 GB in 30 s, $2.58 a month to store
save every 60 min; a failure every 2 days: goodput 80.0%, 6.25 days in total, $7,500

why
  engine=megatron: fastest
      rejected deepspeed, tp=2, dp=8, ZeRO-3, vp=2, micro batch 1 x 64: +12.5%, 40 GiB
      rejected torch: refused
  tp=2: pinned
  seq_length=4096: of the model
  engine=megatron: fastest
      rejected a; b; c

limited by: compute
   60.0%  compute: GEMMs, attention and element-wise operators
   20.0%  NVLink: tensor-parallel collectives
   15.0%  fabric: gradients and weights of replicas
    5.0%  bubble: stages that wait for the first and last micro batches
   45.3%  memory: 43.0 of 95.0 GiB usable on a GPU

a step of 10 s
  compute                 6 s  ##############################
  tensor parallel         2 s  ##########
  data parallel         1.5 s  ########
  pipeline bubble      495 ms  ##

schedule (digits: forward of a micro batch, letters: its backward, dots: idle), drawn with 2 of 2 stages, 16 of 128 \
micro batches
  stage 0  01..aa2bb3cc4dd5ee6ff7gg8hh9ii0jj1aa2bb3cc4dd5ee.ff
  stage 1  .0aa1bb2cc3dd4ee5ff6gg7hh8ii9jj0aa1bb2cc3dd4ee5ff.."""
    )


TOKENS = 43_200 * 2_097_152
SAID: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    # what is different → (changes, on the first screen or among the details, on neither)
    "rows without a number": (
        {"objective": "sft", "epochs": 3.0, "predicted": {"days": None, "cost_usd": None}},
        # 1e9 / 2,097,152 = 476.84 steps of 10 s: 79.5 min, by 0.8 99.3; $50 an hour for both nodes
        ["(2.1M tokens), 1B tokens in full sequences\n", "tokens/s in full sequences · MFU",
         "goodput 80.0%, 99.3 min in total, $83\n",
         "  1B tok    in full sequences: 99.3 min with checkpoints and failures · $83 at $25.00 a node and hour",
         "79.5 min for 1B tokens in full sequences; $66 at"],
        ["at most"],
    ),
    "tokens of text": (
        {"total_tokens": TOKENS},
        ["  90.6B tok 6.25 days with checkpoints", "5 days for 90.6B tokens; $6,000", ", 90.6B tokens\n"],
        ["in full sequences", "at most", "43,200"],
    ),
    "tokens of rows": (
        {"objective": "sft", "total_tokens": TOKENS},
        ["  90.6B tok in full sequences: 6.25 days", "5 days for 90.6B tokens in full sequences; $6,000"],
        ["at most", "43,200"],
    ),
    "rows of a known number": (
        {"objective": "sft", "epochs": 2.5},
        ["  length    2.5 epochs, 43,200 steps: at most 6.25 days", "at most 5 days for 2.5 epochs, 43,200 steps; $"],
        [],
    ),
    "no length": (
        {"predicted": {"days": None, "cost_usd": None}},
        ["  1B tok    99.3 min with checkpoints and failures · $83 at $25.00", "tokens), 1B tokens\n"],
        ["full sequences"],
    ),
    "pairs, no price, few bytes": (
        {"objective": "dpo", "predicted": {"cost_usd": None, "operation": dataclasses.replace(
            OPERATION, data_mbytes_per_s=0.0042)}},
        ["512 pairs a step", "(4.19M tokens)", "data loading: 4.2 kB/s of tokens\ncheckpoint 112 GB in 30 s, "
         "$2.58 a month to store\n",
         "goodput 80.0%, 6.25 days in total\n"],
        [],
    ),
    "processes of a CPU": (
        {"cluster": {"gpu": dataclasses.replace(H100, device="cpu")}},
        ["43,200 steps: 5 days · $6,000 at"],
        ["with checkpoints", "goodput"],
    ),
    "no time for training": (
        {"predicted": {"operation": dataclasses.replace(OPERATION, goodput=0.0)}},
        ["  length    never: checkpoints and failures leave no time for training", "goodput 0.0%\n"],
        ["in total"],
    ),
    "measured": (
        {"predicted": {"memory_band": 0.08, "step_time_band": 0.15, "step_time_evidence": "two runs"}},
        ["(100.0 total; ± 8%)", "(100.0 total) (± 8%)\n", "10 s a step (± 15%) · ", "step 10 s (± 15%: two runs)\n"],
        [],
    ),
    "similar code": (
        {"predicted": {"step_time_evidence": "none; others are ± 12% off"}},
        ["10 s a step (± 12% for similar code)", "step 10 s (predicted; none; others are ± 12% off)\n"],
        ["(calibrated)"],
    ),
    "calibrated": (
        {"predicted": {"step_time_evidence": "calibrated by 1 run: +20%, +1 GiB"}}, ["total) (calibrated)\n"], []
    ),
    "calibrated in time alone": (
        {"predicted": {"step_time_evidence": "calibrated by 1 run: +20%"}}, ["total); prediction not"], ["(calibrated)"]
    ),
    "offload": (
        {"predicted": {"host_ram_gib_per_node": 300.0, "nvme_gib_per_node": 1700.0}},
        ["  host      300 GiB of host memory and 1,700 GiB of NVMe on every node", "  15.0%  host RAM: 300 of 2000 GiB",
         "\n  host memory of a node: 300 GiB\n  NVMe of a node: 1700 GiB\n"],
        [],
    ),
    "offload to memory": (
        {"predicted": {"host_ram_gib_per_node": 300.0}, "cluster": {"host_ram_gib": None}},
        ["  host      300 GiB of host memory on every node"], ["NVMe of", "host RAM"],
    ),
    "one node, one stage": (
        {"cluster": {"num_nodes": 1}, "layout": {"pp": 1}, "predicted": {"memory": PREDICTED.memory[:1]}},
        ["8 × H100 (p5.48xlarge)", "8 x H100 (p5.48xlarge)", "26.2k a GPU; MFU 40.0%\n", "$3,750 at $25.00",
         "\n                  10.0         5.0        20.0         4.0         1.0         2.0        42.0\n",
         "  35.0%  NVLink: tensor-parallel collectives, gradients and weights of replicas"],
        ["1 × p5", "1 x p5", "bubble 12.5%", "logits", "schedule", "fabric"],
    ),
    "eight stages, whose last is the fullest": (
        {"layout": {"pp": 8, "dp": 1, "vp": 4, "gradient_accumulation_steps": 12},
         "predicted": {"memory": tuple(stage(i, 10.0 + i, 5.0, 20.0, 4.0, 0.0, 1.0, 2.0) for i in range(8))}},
        ["\n  stage 4         14.0         5.0        20.0         4.0         1.0         2.0        46.0\n  …\n"
         "  stage 7         17.0 ", "Megatron-core TP 2 · PP 8 · VP 4 · distributed optimizer",
         "drawn with 8 of 8 stages, 8 of 12 micro batches, 2 of 4 virtual stages\n"],
        ["stage 5         15.0", "logits"],
    ),
    "as many stages as are shown": (
        {"layout": {"pp": 6, "dp": 1}, "predicted": {"memory": tuple(stage(i, 9.0, *[1.0] * 6) for i in range(6))}},
        ["\n  stage 4 ", "\n  stage 5 "], ["  …\n"],
    ),
    "little data": (
        {"predicted": {"operation": dataclasses.replace(OPERATION, data_mbytes_per_s=0.015)}},
        ["data loading: 0.015 MB/s of tokens\n"], [],
    ),
    "less data": (
        {"predicted": {"operation": dataclasses.replace(OPERATION, data_mbytes_per_s=0.0099)}},
        ["data loading: 9.9 kB/s of tokens\n"], [],
    ),
    "sixteen stages": (
        {"layout": {"pp": 16, "dp": 1}}, ["with 8 of 16 stages, 16 of 128 micro batches\n"], ["virtual"]
    ),
    "a schedule as it is": (
        {"layout": {"gradient_accumulation_steps": 3}},
        ["idle)\n  stage 0  01..aa2bb.cc\n  stage 1  .0aa1bb2cc.."], ["drawn with"],
    ),
    "groups larger than a node": (
        {"layout": {"tp": 8, "cp": 2, "pp": 1, "dp": 1, "ep": 8, "etp": 2}, "predicted": {"step_time_components_s": {
            "compute": 4.0, "recompute": 2.0, "tensor_parallel": 1.0, "expert_parallel": 0.5, "context_parallel": 0.25,
            "pipeline_transfer": 0.5, "offload": 0.75, "launch": 0.5, "scoring": 0.2, "generation": 0.22, "own": 0.08,
        }}},
        ["  62.0%  compute: GEMMs, attention and element-wise operators, forward passes repeated to save memory, "
         "forwards without gradient of the model and its reference", "  12.5%  fabric: tokens to experts",
         "  10.0%  NVLink: tensor-parallel collectives\n", "   7.5%  host memory and PCIe: optimizer state and weights",
         "   5.0%  host processor: kernels", "   2.2%  generation: completions", "   0.8%  own: own\n"],
        [],
    ),
    "a tensor-parallel group over nodes": (
        {"layout": {"tp": 16, "pp": 1, "dp": 1}}, ["  35.0%  fabric: tensor-parallel collectives"], []
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_differs_is_said(case: str) -> None:
    changes, said, unsaid = SAID[case]
    found = plan(**changes)
    text = summary(view_of(found), width=1000) + "\n" + explanation(found) + "\n"
    joined = text.replace("\n  shorter", " shorter")
    assert [part for part in said if part not in joined] == []
    assert [part for part in unsaid if part in joined] == []


BY_GPU = "$2,642 at p5.48xlarge's $6.88 a GPU and hour, 2026-07-28"


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("p5.48xlarge:2", "$5,284 at $55.04 a node and hour, 2026-07-28"),
        ("dgx-h100", f"{BY_GPU} (no price is known for dgx-h100)"),
        ("2x4xH100", f"{BY_GPU} (no price for 4 of the 8 GPUs of a dgx-h100)"),
        ("8xRTX-4090", "no price is known for workstation-rtx-4090"),
    ],
)  # fmt: skip
def test_two_days_cost_what_the_nodes_or_the_cheapest_gpus_cost(cluster: str, said: str) -> None:
    assert money(parse_cluster(cluster), 2.0) == said


@pytest.mark.parametrize(
    ("sizes", "lines"),
    [
        # Narayanan et al. 2021, figure 3 (1F1B) and 4 (interleaved); a backward takes two units.
        ((2, 1, 3), ["01..aa2bb.cc", ".0aa1bb2cc.."]),
        ((3, 1, 2), ["01.....aa.bb", ".01..aa.bb..", "..0aa1bb...."]),
        ((2, 2, 4), ["01012.aa3bb2aa3bb.cc.ddccdd", ".010aa1bb2aa3bb2cc3ddccdd.."]),
        ((3, 2, 2), ["01.01......aabb..aabb", ".01.01...aabb..aabb..", "..01.01aabb..aabb...."]),
    ],
)
def test_schedules_are_those_of_the_paper(sizes: tuple[int, int, int], lines: list[str]) -> None:
    assert timeline(*sizes).splitlines() == [f"  stage {number}  {line}" for number, line in enumerate(lines)]
    assert timeline(*sizes, width=5).splitlines()[0] == f"  stage 0  {lines[0][:5]} …"
    assert timeline(*sizes, width=len(lines[0])) == timeline(*sizes)


def test_a_change_in_figures_of_both_plans() -> None:
    """Half of the time on twice the GPUs: the same price for the same tokens. Shares move by at least a hundredth."""
    faster = plan(
        cluster={"num_nodes": 4},
        predicted={
            "step_time_s": 5.0, "tokens_per_s": 419_430.4, "days": 9.0, "cost_usd": 99.0, "mfu": 0.5,
            "step_time_components_s": {"compute": 3.5, "tensor_parallel": 0.975, "data_parallel": 0.525},
            "memory": (stage(0, 10.0, 5.0, 10.0, 4.0, 0.0, 1.0, 2.0),),
        },
    )  # fmt: skip
    assert WhatIf("cluster=4x8xH100", faster, "").text(plan()).splitlines() == [
        "what if cluster=4x8xH100: megatron, tp=2, pp=2, dp=4, distributed optimizer, micro batch 1 x 128",
        "  step                  10 s → 5 s        -50.0%",
        "  tokens/s a GPU       13.1k → 13.1k      +0.0%",
        "  MFU                  40.0% → 50.0%      +25.0%",
        "  peak GiB              43.0 → 32.0       -25.6%",
        "  days                     5 → 2.5        -50.0%",
        "  USD                  6,000 → 6,000      +0.0%",
        "  shares of the step: compute +10.0%, pipeline bubble -5.0%, data parallel -4.5%",
    ]
    shorter = dataclasses.replace(faster, job=JobSpec(global_batch_size=512, epochs=9.0))
    assert "  days                     5 → 9          +80.0%" in WhatIf("x", shorter, "no pins").text(plan())
    wider = dataclasses.replace(faster, job=JobSpec(global_batch_size=1024))  # half as many steps
    assert "  days                     5 → 1.25       -75.0%" in WhatIf("x", wider, "").text(plan())
    assert WhatIf("x", shorter, "no pins").text(plan()).startswith("what if x, no pins: megatron")
    assert WhatIf("x", None, "why\nnot").text(plan()) == "what if x: no plan\n  why\n  not"
    assert "days" not in WhatIf("x", faster, "").text(plan(predicted={"days": None, "cost_usd": None}))
    assert "shares" not in WhatIf("x", plan(), "").text(plan())


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ("torch, tp=8, sp, dp=8, FSDP2, micro batch 2 x 4",
         "PyTorch TP 8 + sequence parallel · DP 8, FSDP2 · micro-batch 2 × 4"),
        ("torch, dp=1, micro batch 1 x 1", "PyTorch micro-batch 1 × 1"),
        ("torch, dp=2, FSDP2 (zero_stage=2)", "PyTorch DP 2, FSDP2 (ZeRO-2)"),
        ("deepspeed, dp=4, ZeRO-1", "DeepSpeed DP 4, ZeRO-1"),
        ("deepspeed over megatron, cp=2, dp=4, DDP", "DeepSpeed over Megatron-core CP 2 · DP 4, DDP"),
    ],
)  # fmt: skip
def test_a_layout_in_words_of_the_field(described: str, said: str) -> None:
    assert spoken(described).replace("\u00a0", " ") == said


def test_a_table_of_clusters() -> None:
    nine: Changes = {"num_gpus": 16, "price_per_node_hour_usd": 9.5}
    full: Changes = {"layout": plan().layout, "peak_gib": 40.4, "mfu": 0.3}
    rows = [
        ClusterAnswer(cluster="8xH100", num_gpus=8, price_per_node_hour_usd=None, days=12.0, **full),
        ClusterAnswer(cluster="p5:200", num_gpus=1600, price_per_node_hour_usd=25.0, days=0.25, cost_usd=3e4, **full),
        ClusterAnswer(cluster="x" * 27, days=6.0, cost_usd=2736.0, **nine, **full),
        ClusterAnswer(cluster="rows", **nine, **full),
        ClusterAnswer(cluster="1xT4", num_gpus=1, price_per_node_hour_usd=1.0, why_none="no bf16"),
    ]
    of = "  megatron, tp=2, pp=2, dp=4, distributed optimizer, micro batch 1 x 128"
    assert cluster_table(rows).splitlines() == [
        "cluster                      GPUs $/node h   GiB    MFU      days            USD",
        "8xH100                          8        -    40  30.0%      12.0       no price", of,
        "p5:200                      1,600    25.00    40  30.0%       0.2         30,000", of,
        "xxxxxxxxxxxxxxxxxxxxxxxxxxx",
        "                               16     9.50    40  30.0%       6.0          2,736", of,
        "rows                           16     9.50    40  30.0%         -              -", of,
        "1xT4                            1     1.00",
        "  nothing fits: no bf16",
        "fastest: p5:200",
        f"cheapest: {'x' * 27}",
    ]  # fmt: skip
    assert ("fastest" in cluster_table(rows[1:2]), "fastest" in cluster_table(rows[1:3])) == (False, True)


@pytest.mark.parametrize(
    ("count", "seconds", "said"),
    [
        (999.4, 0.9994, ("999", "999 ms")), (999.6, 0.9996, ("1k", "1 s")), (1_234_567, 119.9, ("1.23M", "120 s")),
        (2e9, 120, ("2B", "2 min")), (1.5e12, 7199, ("1.5T", "120 min")), (2.11e15, 7200, ("2,110T", "2 h")),
        (-5000, 172_799, ("-5k", "48 h")), (0.5, 172_800, ("0.5", "2 days")), (0, 8.64e8, ("0", "10,000 days")),
    ],
)  # fmt: skip
def test_counts_and_durations_have_three_digits(count: float, seconds: float, said: tuple[str, str]) -> None:
    assert (human_count(count), human_seconds(seconds)) == said
    assert human_seconds(30.0, like=7200.0) == "0.00833 h"


MEMORY = {
    "stages": (stage(0, 10.0, 5.0, 20.0, 4.0, 0.04, 1.0, 2.0), dataclasses.replace(
        stage(1, 30.0, 5.0, 60.0, 2.0, 0.0, 1.0, 2.0), phases_gib={"forward": 60.0, "step": 100.0})),
    "usable_gib": 50.0, "memory_gib": 80.0, "host_ram_gib_per_node": 300.0, "host_load_gib_per_node": 40.0,
    "nvme_gib_per_node": 0.0, "verdict": "does not fit", "binding": "optimizer",
}  # fmt: skip


def report(**changes: Any) -> FitReport:
    found = plan()
    of = {"layout": found.layout, "model": found.model, "cluster": found.cluster, "job": found.job}
    return FitReport(**{**MEMORY, **of, "changes": ("tp=4", "pp=4"), "reasons": ("states: 2.",), **changes})


def test_a_picture_of_memory() -> None:
    """A column is 100/60 GiB: the fullest stage is larger than the GPU. Parts below 0.05 GiB in all stages are left
    out."""
    text = picture(report())
    assert text.plain.splitlines()[2:] == [
        "",
        "does not fit: 100.0 of 50.0 GiB usable (80.0 total); largest: optimizer",
        "",
        "  stage      weights   gradients   optimizer activations     buffers    overhead        peak   GiB",
        "  0             10.0         5.0        20.0         4.0         1.0         2.0        42.0",
        "  1             30.0         5.0        60.0         2.0         1.0         2.0       100.0",
        "",
        "  0     ██████▓▓▓▒▒▒▒▒▒▒▒▒▒▒▒░░+·     |                              ",
        "  1     ██████████████████▓▓▓▒▒▒▒▒▒▒▒▒|▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒░+·",
        "        █ weights   ▓ gradients   ▒ optimizer   ░ activations   + buffers   · overhead   | usable",
        "  peaks of stage 1 by moment, GiB: forward 60.0, step 100.0",
        "  host memory of a node: 300 of 2000 GiB",
        "  host memory while loading, of a node: 40 of 2000 GiB",
        "it fits with tp=4",
        "it fits with pp=4",
        "states: 2.",
    ]  # fmt: skip
    assert {text.plain[span.start] for span in text.spans if span.style == "#e15759"} == {"▒"}
    small = report(
        stages=(stage(0, 10.0, 5.0, 20.0, 4.0, 0.05, 0.0, 0.0),), nvme_gib_per_node=90.0, host_load_gib_per_node=0.0,
        model=dataclasses.replace(plan().model, source="made for the size 8B: x"), changes=(), reasons=(),
        cluster=dataclasses.replace(CLUSTER, host_ram_gib=None, nvme_gib=900.0),
    )  # fmt: skip
    lines = picture(small).plain.splitlines()
    assert [lines[1], *lines[6:8], lines[9], *lines[11:]] == [
        "  made for the size 8B: x",
        "  stage      weights   gradients   optimizer activations      logits        peak   GiB",
        "  0             10.0         5.0        20.0         4.0         0.1        39.0",
        "  0     ████████▓▓▓▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒░░░         |                      ",  # of 80 GiB
        "  host memory of a node: 300 GiB",
        "  NVMe of a node: 90 of 900 GiB",
    ]


def test_a_memory_report_as_json() -> None:
    said = report().as_json()
    assert (said["stages"][1]["stage"], said["stages"][1]["optimizer"]) == (1, 60.0)
    assert said["phases"] == [{"stage": 0}, {"stage": 1, "forward": 60.0, "step": 100.0}]
    assert said.items() >= {
        "gpus": 16, "peak_gib": 100.0, "usable_gib": 50.0, "memory_gib": 80.0, "binding": "optimizer",
        "changes": ["tp=4", "pp=4"], "reasons": ["states: 2."], "host_ram_gib_per_node": 300.0,
        "host_load_gib_per_node": 40.0, "host_ram_gib_there": 2000.0, "nvme_gib_per_node": 0.0,
        "nvme_gib_there": CLUSTER.nvme_gib, "gpu": "H100", "verdict": "does not fit", "model": "llama-3.1-8b",
    }.items()  # fmt: skip


def test_a_table_of_the_largest_models() -> None:
    memory = MemoryReport(**MEMORY, layout=plan().layout)
    less = dataclasses.replace(memory, stages=memory.stages[:1], nvme_gib_per_node=1234.0)
    small, large = (
        Request(model=load_model(name), cluster=CLUSTER, job=plan().job) for name in ("qwen2.5-0.5b", "llama-3.2-1b")
    )
    found = [_fitting(small, "full", memory), _fitting(small, "LoRA", memory), _fitting(large, "LoRA", less)]
    of = "megatron, tp=2, pp=2, dp=4, distributed optimizer, micro batch 1 x 128"
    assert table(CLUSTER, plan().job, found).splitlines() == [
        "16 x H100 (p5.48xlarge); bf16, sequences of 4096, 512 a step",
        "  95.0 GiB usable a GPU, 2,000 GiB of host memory a node, 28,610 GiB of NVMe a node",
        "",
        "                                                      full                    LoRA                   QLoRA",
        "  model                 parameters" + "     GPU    host    disk" * 3 + "   GiB",
        "  qwen2.5-0.5b                494M   100.0     300       0   100.0     300       0            does not fit",
        "  llama-3.2-1b               1.24B            does not fit    42.0     300   1,234            does not fit",
        "  llama-3.2-3b               3.21B            does not fit            does not fit            does not fit",
        "",
        f"largest, full: qwen2.5-0.5b: {of}",
        f"largest, LoRA: llama-3.2-1b: {of}",
        "largest, QLoRA: none",
    ]  # fmt: skip
    bare = dataclasses.replace(CLUSTER, host_ram_gib=None, nvme_gib=None)
    assert table(bare, plan().job, found).splitlines()[1] == "  95.0 GiB usable a GPU"
    assert to_plain(found)[2] == {
        "model": "llama-3.2-1b", "parameters": 1_235_814_400, "way": "LoRA", "layout": of, "peak_gib": 42.04,
        "host_ram_gib_per_node": 300.0, "nvme_gib_per_node": 1234.0,
    }  # fmt: skip


def test_a_page_of_round_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the slowest step that is drawn (30 s) and half of the usable memory are the middle of the chart."""
    own, pins = plan(decisions=DECISIONS), []
    others = [
        ("torch, dp=16, DDP, micro batch 1 x 32", 47.5, 15.0, True), ("torch, dp=16, FSDP2", 95.0, 30.0, True),
        ("torch, slow", 5.0, 30.1, True), ("torch, large", 96.0, 15.0, False), (describe(own.layout), 43.0, 10.0, True),
    ]  # fmt: skip

    def compare(request: Request) -> Any:
        pins.append(request.pins)
        engines = {"torch": Layout(engine="torch", implementation="huggingface"), "megatron": own.layout}
        return SimpleNamespace(
            layouts=[ComparedLayout(name, engines[name.split(",")[0]], *rest) for name, *rest in others]
        )

    monkeypatch.setattr(html, "compare", compare)
    monkeypatch.setattr(html, "explain", lambda each: "because <1>")
    text = html.page(view_of(own))
    assert pins == [Pins(tp=2)]
    assert re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="4" fill="(\S+)" opacity="0.7"( stroke=)?', text) == [
        ("360.0", "170.0", "#e07b39", ""), ("672.0", "48.0", "#e07b39", ""), ("256.0", "181.6", "#3c9a5f", " stroke="),
    ]  # fmt: skip
    # Up to 30 s and 95 GiB, in at most six steps of 1, 2 or 5 times a power of ten, where points would be.
    ticks = re.findall(r'<text x="(\d+)" y="(\d+)" text-anchor="(middle|end)">([\d.]+)<', text)
    assert [(number, x) for x, _, where, number in ticks if where == "middle"] == [
        ("0", "48"), ("5", "152"), ("10", "256"), ("15", "360"), ("20", "464"), ("25", "568"), ("30", "672"),
    ]  # fmt: skip
    assert [(number, y) for _, y, where, number in ticks if where == "end"] == [
        ("0", "296"), ("20", "245"), ("40", "193"), ("60", "142"), ("80", "91"),
    ]  # fmt: skip
    widths = re.findall(r'<span title="([\w ]+)" style="width: ([\d.]+)%', text)
    assert widths[:7] == [(name, f"{size:.2f}") for name, size in PREDICTED.memory[0].components_gib.items()]
    assert widths[14:] == [
        ("compute", "60.00"), ("tensor parallel", "20.00"), ("data parallel", "15.00"), ("pipeline bubble", "4.95"),
        ("optimizer", "0.05"),
    ]  # fmt: skip
    assert [
        words
        for words in (
            "<title>PyTorch DP 16, DDP · micro-batch 1\u00a0×\u00a032: 15 s, 47.5 GiB</title>",
            "3 layouts that fit",
            "because &lt;1&gt;",
            'aria-label="weights 10%, gradients 5%, optimizer 20%, activations 4%, logits 0%, buffers 1%, overhead 2%"',
            "<p>Stage 1: 43.0 GiB of 95.0 usable (100.0 total)</p>",
        )
        if words not in text
    ] == []
    assert re.findall(r"</span>(\w+) ([\d.]+) GiB", text)[-7:][4] == ("logits", "6.0")
    gone = html._bar({"a": 1.0, "b": 0.0}, 4.0), html._keys({"a": 1.0, "b": 0.0}, str)
    assert 'aria-label="a 25%"' in gone[0]
    assert "b 0" not in gone[1]
