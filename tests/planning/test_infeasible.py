"""Changes that are proposed where nothing fits (kit/planner/explain/infeasible): which, and in which order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kit.cost.hardware import usable_gib
from kit.cost.memory.offload import host_ram_gib_per_node
from kit.cost.memory.peak import peak_gib
from kit.planner.explain import infeasible
from kit.planner.request import Request
from kit.planner.rules import violations
from kit.specs.layout import Pins
from tests.planning.questions import LORA, ONE, SHORT, ZERO, M, candidate, request
from tests.planning.shapes import DENSE, EXPERTS, NODE, NODES, Rows, by_hand, work
from tests.support.models import cluster, megatron, torch

NAMED = replace(NODE, name="mine", host_ram_gib=1000.0, nvme_gib=100.0)
NEEDED = host_ram_gib_per_node(work(SHORT))


def changes(of: Callable[..., Any], *more: Any, **asked: Any) -> list[tuple[Any, ...]]:
    """(kind, factor, words) of the changes that are proposed."""
    return [(each.kind, each.factor, each.label) for each in of(request(**asked), *more)]


INFEASIBLE: Rows = [
    ("other jobs", lambda: changes(infeasible._other_jobs, seq_length=2049), [
        ("batch", 2, "job.global_batch_size=32 instead of 16"), ("batch", 4, "job.global_batch_size=64 instead of 16"),
        ("batch", 8, "job.global_batch_size=128 instead of 16"), ("length", 2049 / 1024,
        "job.seq_length=1024 instead of 2049"),
        ("length", 2049 / 512, "job.seq_length=512 instead of 2049"), ("optimizer", 2,
        "job.optimizer.name=adamw-8bit instead of adamw"),
        ("lora", math.inf, "--lora (or job.lora.four_bit=false): adapters trained instead of all weights"),
        ("lora", math.inf,
        "--qlora (or job.lora.four_bit=true): adapters on 4-bit weights trained instead of all weights")]),
    ("other jobs with adapters", lambda: [changes(infeasible._other_jobs, seq_length=512, lora=replace(LORA,
        **{each: True}))[3:] for each in ("use_rslora", "four_bit", "eight_bit")],
     [[("lora", 1, "--qlora (or job.lora.four_bit=true): adapters on 4-bit weights instead of adapters")],
      [("lora", 1, "--lora (or job.lora.four_bit=false): adapters instead of adapters on 4-bit weights")],
      [("lora", 1, "--qlora (or job.lora.four_bit=true job.lora.eight_bit=false): adapters on 4-bit weights instead of "
        "adapters on 8-bit weights")]]),
    ("four bits instead of eight", lambda: [each.request.job.lora.quantised for each in infeasible._other_jobs(request(
        lora=replace(LORA, eight_bit=True)))][-1], "four_bit"),
    ("other jobs with experts", lambda: [changes(infeasible._other_jobs, model=EXPERTS, lora=replace(LORA,
        four_bit=each))[-1][2] for each in (False, True)],
     ["--qlora (or job.lora.four_bit=true): adapters on 4-bit weights instead of adapters",
      "job.lora.quantize_moe_experts=true: experts in 4 bits too"]),
    ("experts that are in four bits", lambda: [each[0] for each in changes(infeasible._other_jobs, model=EXPERTS,
        lora=replace(LORA, four_bit=True, quantize_moe_experts=True))].count("experts"), 0),
    ("experts in four bits", lambda: [each.request.job.lora for each in infeasible._other_jobs(request(
        model=EXPERTS, lora=replace(LORA, four_bit=True)))][-1],
     replace(LORA, four_bit=True, quantize_moe_experts=True)),
    ("changed jobs", lambda: [(each.request.job.global_batch_size, each.request.job.seq_length,
        each.request.job.optimizer.name,
        each.request.job.lora and each.request.job.lora.four_bit) for each in infeasible._other_jobs(request())],
     [(32, 1024, "adamw", None), (64, 1024, "adamw", None), (128, 1024, "adamw", None), (16, 512, "adamw", None), (16,
         1024, "adamw-8bit", None),
      (16, 1024, "adamw", False), (16, 1024, "adamw", True)]),
    ("more of a node, then nodes", lambda: changes(infeasible._more_gpus, machines=cluster("2xH100"))[:3], [
            ("nodes", 2, "cluster=4xH100 instead of 2"), ("nodes", 4, "cluster=8xH100 instead of 2"),
            ("nodes", 8, "cluster=dgx-h100:2 (16 GPUs) instead of 1")]),
    ("more nodes", lambda: changes(infeasible._more_gpus, machines=replace(NODES, name="mine"))[::6],
     [("nodes", 2, "cluster.num_nodes=16 (128 GPUs) instead of 8"), ("nodes", 128,
         "cluster.num_nodes=1024 (8192 GPUs) instead of 8")]),
    ("a lone node stays alone", lambda: changes(infeasible._more_gpus, machines=replace(NAMED,
        inter_node_gbytes_per_s=0.0)), []),
    ("larger GPUs", lambda: [infeasible._is_larger(replace(NODE.gpu, **more), NODE.gpu) for more in (
        {"memory_gib": 200.0}, {}, {"memory_gib": 200.0, "device": "cpu"}, {"memory_gib": 200.0, "bf16_tflops": 1.0},
        {"memory_gib": 200.0, "hbm_gbytes_per_s": 1.0})], [True, False, False, False, False]),
    ("capacities that are exceeded", lambda: [infeasible._excess(replace(work(SHORT), cluster=replace(NODE,
        host_ram_gib=each))) for each in (
        NEEDED / 0.9 * 2, NEEDED / 0.9 / 2, None)],
     [(0, [0.5, SMALL := peak_gib(work(SHORT)) / usable_gib(NODE.gpu)]), (1, [2, SMALL]), (1, [2, SMALL])]),
    ("a shortfall", lambda: [infeasible.shortfall(replace(work(SHORT.but(offload_optimizer=place)), cluster=replace(
        NODE, host_ram_gib=host, nvme_gib=disks))).partition("; ")[2] for place, host, disks in (
            ("cpu", 1000.0, None), ("cpu", 0.2, None), ("cpu", None, None), ("nvme", 1000.0, 1000.0), ("nvme", 1000.0,
            0.05), ("nvme", 1000.0, None))],
     ["", f"{NEEDED:.0f} GiB of host memory a node, 0 of 0 are usable: {NEEDED - 0.18:.0f} GiB too many",
      f"{NEEDED:.0f} GiB of host memory a node, which is not known", "",
          "0 GiB of NVMe a node, which has 0: 0 GiB too many",
      "0 GiB of NVMe a node, which is not known"]),
    ("too little of a GPU", lambda: [infeasible.shortfall(replace(work(torch()), cluster=replace(ONE,
        gpu=replace(ONE.gpu, memory_gib=each))))
                                     for each in (80.0, 0.5)], [
        f"needs {(NEED := peak_gib(work(torch()))):.1f} GiB a GPU, 76.0 of 80.0 are usable",
        f"needs {NEED:.1f} GiB a GPU, 0.5 of 0.5 are usable: {NEED - 0.475:.1f} GiB too many"]),
    ("one message of all engines", lambda: infeasible.nothing_legal(request(machines=replace(ONE, gpu=replace(
        ONE.gpu, bf16_tflops=0.0)))).splitlines(),
     ["precision=bf16 on H100, which has no bf16; use precision=fp16 with engine=deepspeed, fp32, or a GPU from "
      "Ampere on"]),
    ("a batch that does not divide",
        lambda: [line.rpartition(" takes ")[0] for line in infeasible.nothing_legal(request(
        Pins(engine="torch", zero_stage=3, tp=1), machines=cluster("2xH100"), global_batch_size=3)).splitlines()[1:]],
     ["hint: with job.global_batch_size=2 it", "hint: with job.global_batch_size=4 it", "hint: with 1 GPUs it"]),
    ("another engine that refuses", lambda: infeasible.nothing_legal(request(Pins(engine="torch", vp=2),
        machines=ONE)).splitlines(),
     ["vp=2 on engine=torch, which does not take it; use engine=megatron, or leave it out",
      "engine=megatron would refuse it too: vp=2 with pp=1: virtual stages interleave pipeline stages; use pp>1, or "
      "vp=1"]),
    ("ranks beside GPUs", lambda: [next((each.message for each in violations(work(
        layout)) if each.rule == "world_size"), "") for layout in (
        megatron(tp=2, pp=2, dp=2), megatron(tp=2, pp=2, dp=8), megatron(pp=3, dp=2), megatron(cp=3), torch(dp=4))],
     ["", "dp·cp·tp·pp=32 is not the 8 GPUs of dgx-h100; use dp=2",
      "tp·pp·cp=3 does not divide the 8 GPUs of dgx-h100; use sizes whose product is 1, 2, 4 or 8",
      "tp·pp·cp=3 does not divide the 8 GPUs of dgx-h100; use sizes whose product is 1, 2, 4 or 8",
      "dp·cp·tp·pp=4 is not the 8 GPUs of dgx-h100; use dp=8"]),
    ("halves", lambda: [(each.cluster.num_nodes,
        each.cluster.gpus_per_node) for each in request(machines=replace(NODES, num_nodes=4)).halved()],
     [(2, 8), (1, 8), (1, 4), (1, 2), (1, 1)]),
    ("engines that cannot", lambda: [sorted(infeasible._able(each)) for each in (
        {"torch": (infeasible.Violation("flag_of_engine", ""),), "megatron": (infeasible.Violation("batch", ""),)},
        {"deepspeed": (infeasible.Violation("deepspeed_pipeline", ""),)})], [["megatron"], ["deepspeed"]]),
    ("the nearest miss", lambda: [infeasible.nearest_miss(request(Pins(engine="megatron")), each) for each in (
        [candidate(None, layout=M.but(micro_batch_size=size)) for size in (8, 2, 4)], [])], [M.but(micro_batch_size=2),
        None]),
    ("pins in the way", lambda: [(each.kind, each.label, getattr(each.request.pins, each.kind),
        each.fallbacks) for each in infeasible._changes(
        request(Pins(tp=2, sp=True)), ()) if each.label.startswith("layout")], [("tp",
        "layout.tp left to the planner instead of 2", None, True), (
            "sp", "layout.sp left to the planner instead of True", None, True)]),
    ("larger GPUs that hold a layout", lambda: next((each.label, each.factor,
        len(each.among or ())) for each in infeasible._changes(
        request(), [candidate(None, 100.0), candidate(1.0, 1.0), candidate(2.0, 2.0), candidate(None, 1e4)])
        if each.kind == "gpu"),
     ("cluster.gpu=H200 (140 GiB) instead of H100", 1.8, 1)),
    ("memory of a node", lambda: [changes(infeasible._memory_of_a_node, pins=ZERO, model=replace(DENSE, num_layers=100),
        machines=replace(NODE, name=name, host_ram_gib=host, nvme_gib=disks))
                                  for name, host, disks in (("mine", None, None), ("mine", 0.5, 0.0), ("p4d.24xlarge",
                                  0.5, 0.0), ("mine", 0.1, 0.0), ("mine", 99.0, None), (
                                      "mine", 99.0, 0.0))],
     [[("host", 1, "cluster.host_ram_gib=1 for offload, if that is what a node has")], [("host", 2,
         "cluster.host_ram_gib=1 instead of 0, for offload")],
      [], [], [("nvme", 2, "cluster.nvme_gib=1 for offload to disks, if that is what a node has")], []]),
    ("memory of a node whose GPUs are too small", lambda: changes(infeasible._memory_of_a_node, pins=ZERO,
        machines=replace(
        NAMED, host_ram_gib=None, gpu=replace(NODE.gpu, memory_gib=0.3))), []),
    ("layouts that a node is too small for",
        lambda: [sorted({each.engine for each in infeasible._short_of_a_node(request(each))}) for each in (
        Pins(), Pins(engine="megatron"), ZERO)], [["deepspeed", "torch"], [], ["deepspeed"]]),
]  # fmt: skip


test_value = by_hand(INFEASIBLE)


def test_the_cheapest_change_of_each_kind_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind the smallest that helps; last of all, and only where last resorts count, what costs accuracy."""
    cost = infeasible._Cost
    made = [
        ("gpu", cost.GPUS, 2.0, 2), ("nodes", cost.GPUS, 2.0, 3), ("nodes", cost.GPUS, 8.0, 4), ("nodes", cost.GPUS,
        4.0, 6),
        ("lora", cost.TRAINED, math.inf, 8), ("tp", cost.NOTHING, 1.0, 10), ("batch", cost.TASK, 2.0, 5),
        ("length", cost.TASK, 4.0, 12), ("pp", cost.NOTHING, 1.0, -14), ("host", cost.TOLD, 1.0, 16),
    ]  # fmt: skip
    all_of_them = [
        infeasible._Change(f"{kind} {size}", request(global_batch_size=abs(size)), kind, price, factor, None, size < 0)
        for kind, price, factor, size in made
    ]
    resorts: dict[int, bool] = {}

    def can_fit(asked: Request, among: Any, fallbacks: bool) -> bool:
        resorts[asked.job.global_batch_size] = fallbacks
        return asked.job.global_batch_size % 2 == 0

    monkeypatch.setattr(infeasible, "_changes", lambda *_: iter(all_of_them))
    monkeypatch.setattr(infeasible, "can_fit", can_fit)
    monkeypatch.setattr(infeasible, "_with_loss_of_accuracy", lambda _: iter(["lossy"]))
    first = ("tp 10", "pp -14", "lora 8", "host 16", "length 12")
    assert infeasible.changes_that_fit(request(), ()) == (*first, "lossy")
    assert (resorts[14], resorts[10]) == (True, False)
    assert infeasible.changes_that_fit(request(), (), fallbacks=False) == first
    assert resorts[14] is False
    all_of_them[:] = all_of_them[:4]
    assert infeasible.changes_that_fit(request(), (), fallbacks=False) == ("gpu 2", "nodes 6")
