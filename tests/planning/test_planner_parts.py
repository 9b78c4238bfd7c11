"""Parts of the planner, each beside an answer that follows from its rule: layouts that are tried, ties, alternatives,
changes that are proposed, node types, lengths, schedules, and plans on fewer nodes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kit.cost.hardware import peak_flops_per_s, usable_gib
from kit.cost.memory.offload import host_ram_gib_per_node
from kit.cost.memory.peak import peak_gib
from kit.cost.model.flops import model_flops_per_token
from kit.cost.reliability import operation
from kit.cost.time.step import StepTimer
from kit.cost.workload import Workload
from kit.errors import PlanError, SpecError
from kit.planner import calibration, candidates, cluster_selection, elastic, length, schedule, search
from kit.planner.calibration import Calibration, Residual
from kit.planner.candidates import TooSlow, fast_paths, layouts
from kit.planner.cluster_selection import ClusterOption, Constraints, render_options
from kit.planner.compare import ComparedLayout, Comparison
from kit.planner.describe import describe
from kit.planner.divisors import divisors, one_of
from kit.planner.explain import decisions, fewer_gpus, infeasible, last_resort, notes
from kit.planner.last_resorts import LAST_RESORTS, ON_HOST, without_loss
from kit.planner.make_plan import make_plan, request_for
from kit.planner.request import Request
from kit.planner.rules import violations
from kit.planner.search import Candidate, SearchResult, _best, _needs_no_less, engine_simplicity, simplicity
from kit.specs.epoch import Epoch
from kit.specs.job import LoraSpec, OptimizerSpec
from kit.specs.layout import Layout, Pins
from kit.specs.run import BatchRampSpec, DataSpec, RunSpec, ScheduleSpec
from kit.units import human_count, human_seconds
from tests.planning.shapes import DENSE, EXPERTS, GEMMA, MIXED, NODE, NODES, STACKS, Rows, by_hand, flat, work
from tests.support.models import cluster, deepspeed, job, megatron, torch
from tests.support.refusals import refusal

LORA = LoraSpec(rank=7)
ONE = cluster("1xH100")
OFFLOADS = [("cpu", "none"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "none"), ("nvme", "cpu"), ("nvme", "nvme")]
SIZES = [1, 2, 4, 8, 16]


def request(pins: Pins | None = None, model: Any = DENSE, machines: Any = NODE, **changes: Any) -> Request:
    """16 sequences of 1,024 tokens."""
    the_job = job(**{"seq_length": 1024, "global_batch_size": 16, **changes})
    return Request(model=model, cluster=machines, job=the_job, pins=pins or Pins())


def tried(
    engine: Any, names: str, pins: Pins | None = None, further: bool = False, **asked: Any
) -> list[tuple[Any, ...]]:
    """Different values of these fields, in order."""
    found = layouts(request(pins, **asked), engine, further)
    return sorted({tuple(getattr(each, name) for name in names.split()) for each in found}, key=str)


def every(*values: Any) -> list[tuple[Any, ...]]:
    """All combinations, in order."""
    return sorted(product(*values), key=str)


def paths(pins: Pins | None = None, compiles: bool = True, **asked: Any) -> list[tuple[Any, Any]]:
    """(compiled, chunked) of the fast paths."""
    return [(each.compile_layers, each.chunked_loss) for each in fast_paths(request(pins, **asked), compiles)]


TORCH, ZERO = Pins(engine="torch"), Pins(engine="deepspeed")
SLOW, FAST, CHUNKS = (None, None), (True, True), (None, True)
WAY = "chunked_loss activation_offloading tiled_mlp recompute"
WAYS = [(True, True, True, "full"), (True, True, False, "full"), *[(True, False, each, again) for each in (True, False)
                                                                   for again in ("none", "full")]]  # fmt: skip
CANDIDATES: Rows = [
    ("one GPU", lambda: tried("torch", "zero_stage compile_layers recompute micro_batch_size", machines=ONE),
     every([0], [False, True], ["none", "full"], SIZES)),
    ("sizes that share a batch", lambda: tried("torch", "micro_batch_size gradient_accumulation_steps dp",
        global_batch_size=48,
                                               pins=Pins(zero_stage=3, tp=1)), [(1, 6, 8), (2, 3, 8), (3, 2, 8), (6, 1,
                                               8)]),
    ("a batch that does not divide", lambda: tried("torch", "micro_batch_size gradient_accumulation_steps",
        global_batch_size=17,
                                                   pins=Pins(zero_stage=3, tp=1)), [(1, 2)]),
    ("the longest micro batch", lambda: tried("torch", "micro_batch_size", seq_length=8192, machines=ONE,
        global_batch_size=32),
     [(1,), (2,), (4,), (8,)]),
    ("a pinned micro batch", lambda: tried("torch", "micro_batch_size", Pins(micro_batch_size=3), machines=ONE), [(3,
        )]),
    ("FSDP2 over a node", lambda: tried("torch", "tp zero_stage"), [(1, 0), *every([1, 2, 4], [2, 3])]),
    ("pinned stages", lambda: [tried("torch", "tp zero_stage", each) for each in (Pins(zero_stage=1), Pins(tp=2),
        Pins(cp=2),
                                                                                  Pins(zero_stage=0))],
     [[(1, 1)], every([2], [0, 2, 3]), every([1], [2, 3]), [(1, 0)]]),
    ("ring by default", lambda: [tried("torch", "cp cp_comm_type dp", each) for each in (Pins(cp=2), Pins(cp=2,
        cp_comm_type="a2a"))],
     [[(2, "p2p", 4)], [(2, "a2a", 4)]]),
    ("fast paths", lambda: [paths(), paths(machines=ONE), paths(TORCH), paths(TORCH, False), paths(precision="fp8"),
                            paths(TORCH, precision="fp16"), paths(TORCH, machines=cluster("1xcpu")), paths(Pins(
                                engine="torch", implementation="local")), paths(Pins(engine="torch",
                                implementation="huggingface"))],
     [[SLOW], [SLOW, FAST], [SLOW, FAST], [SLOW], [SLOW, FAST], [SLOW], [SLOW], [SLOW], [SLOW, FAST]]),
    ("fast paths of jobs", lambda: [paths(TORCH, objective="sft"), paths(TORCH, lora=LORA), paths(TORCH, model=EXPERTS),
                                    paths(TORCH, model=STACKS), paths(TORCH.but(chunked_loss=False,
                                    compile_layers=False)),
                                    paths(TORCH.but(chunked_loss=False))],
     [[SLOW, CHUNKS]] * 3 + [[SLOW], [(False, False)], [(None, False), (True, False)]]),
    # Further layouts leave out what is usual: here nothing else than the chunked loss with compiled blocks.
    ("what saves memory", lambda: tried("torch", WAY, TORCH, True, machines=ONE, objective="sft"),
     sorted(way for way in WAYS if way[1] or way[2])),
    ("what saves memory in pretraining", lambda: tried("torch", WAY, TORCH, True, machines=ONE), sorted(WAYS)),
    ("pinned savers", lambda: tried("torch", WAY, TORCH.but(chunked_loss=False, tiled_mlp=False), True, machines=ONE),
     [(False, True, False, "full")]),
    ("adapters on the host", lambda: tried("torch", "offload_optimizer offload_param", TORCH, True, machines=ONE,
        lora=LORA),
     [("cpu", "cpu"), ("none", "none")]),
    ("adapters on the host save by chunks", lambda: sorted({(each.chunked_loss,
        each.activation_offloading) for each in layouts(
        request(TORCH, machines=ONE, lora=LORA), "torch", True) if each.offload_param == "cpu"}), [(False, False),
        (True, False)]),
    ("pinned inputs on the host", lambda: sorted({each.tiled_mlp for each in layouts(request(TORCH.but(
        activation_offloading=True), machines=ONE, lora=LORA), "torch", True) if each.offload_param == "cpu"}), [False,
        True]),
    ("whole weights stay", lambda: tried("torch", "offload_param", TORCH, True, machines=ONE), [("none",)]),
    ("a pinned place", lambda: tried("torch", "offload_param", TORCH.but(offload_param="none"), True, machines=ONE,
        lora=LORA), [("none",)]),
    ("further layouts have whole layers", lambda: tried("torch", "tp cp", TORCH, True), [(1, 1)]),
    ("ranks of long sequences", lambda: [sorted({each.cp for each in layouts(request(pins, seq_length=size, **more),
        "torch", True)})
                                         for pins, size, more in (
        (TORCH, 65537, {}), (TORCH, 65536, {}), (TORCH, 65537, {"objective": "sft"}), (TORCH, 65537, {"lora": LORA}),
        (TORCH.but(cp=4), 65537, {}), (TORCH.but(zero_stage=2), 65537, {}), (TORCH.but(cp=1), 65537, {}),
        (TORCH.but(tp=2), 65537, {}),
        (TORCH.but(zero_stage=3, cp_comm_type="a2a"), 65537, {}))],
     [[1, 2, 4, 8], [1], [1], [1], [4], [1], [1], [], [1, 2, 4, 8]]),
    ("how long sequences are exchanged", lambda: sorted({each.cp_comm_type for each in layouts(request(TORCH.but(
        cp_comm_type="a2a"), seq_length=65537), "torch", True) if each.cp == 8}), ["a2a"]),
    ("ZeRO", lambda: tried("deepspeed", "implementation tp zero_stage sp"),
     [*every(["huggingface"], [1], [1, 2, 3], [False]), *every(["local"], [2, 4, 8], [2, 3], [True])]),
    ("ZeRO over Megatron without whole sequences", lambda: tried("deepspeed", "tp sp", Pins(zero_stage=2),
        seq_length=1026),
     [(1, False), (2, True), (4, False), (8, False)]),
    ("pinned ZeRO", lambda: [tried("deepspeed", "implementation zero_stage", each) for each in (ZERO,
        ZERO.but(zero_stage=0), Pins(
        zero_stage=1), Pins(zero_stage=2))],
     [every(["huggingface"], [1, 2, 3]), [("huggingface", 0)], [("huggingface", 1)], every(["huggingface", "local"],
         [2])]),
    ("splits on request", lambda: [tried("deepspeed", "tp cp cp_comm_type sp", each) for each in (
        Pins(tp=2), ZERO.but(tp=2), ZERO.but(cp=2), ZERO.but(implementation="local", tp=2),
        ZERO.but(implementation="local"))],
     [[], [(2, 1, "all_gather", False)], [(1, 2, "a2a", False)], [(2, 1, "all_gather", True)], [(1, 1, "all_gather",
         False)]]),
    ("a second copy", lambda: [tried("deepspeed", "zero_stage zero_hpz", each, machines=nodes) for each, nodes in (
        (ZERO, NODES), (ZERO, NODE), (ZERO.but(zero_hpz=4, zero_stage=3), NODE), (ZERO.but(tp=2), NODES), (ZERO,
        cluster("4x1xH100")))],
     [[(1, 1), (2, 1), (3, 1), (3, 8)], every([1, 2, 3], [1]), [(3, 4)], every([1, 2, 3], [1]), every([1, 2, 3], [1])]),
    ("ZeRO on one GPU", lambda: [tried("deepspeed", "zero_stage", each, machines=ONE) for each in (None, ZERO,
        Pins(zero_stage=2), Pins(
        offload_optimizer="cpu"))], [[], [(1,), (2,), (3,)], [(2,)], [(1,), (2,), (3,)]]),
    ("ZeRO on one GPU, further", lambda: [tried("deepspeed", "offload_optimizer offload_param", Pins(zero_stage=each),
        True, machines=ONE)
                                          for each in (1, 3)], [[("cpu", "none"), ("none", "none")], sorted([*OFFLOADS,
                                          ("none", "none")])]),
    ("unusual stages too", lambda: ("none", "none") in tried("deepspeed", "offload_optimizer offload_param", None, True,
        machines=ONE), True),
    ("pinned offload", lambda: [candidates._further_offloads(each, zero) for each, zero in (
        (Pins(offload_optimizer="nvme"), 3), (Pins(offload_param="cpu"), 3), (Pins(offload_optimizer="cpu"), 2),
        (Pins(), 2), (Pins(), 3))],
     [[("nvme", "cpu"), ("nvme", "nvme")], [("cpu", "cpu"), ("nvme", "cpu")], [], [("cpu", "none")], OFFLOADS]),
    ("Megatron's splits", lambda: tried("megatron", "tp pp cp dp"),
     sorted([*[(1, pp, 1, 8 // pp) for pp in (1, 2, 4)], *[(2, pp, 1, 4 // pp) for pp in (1, 2, 4)], (4, 1, 1, 2), (4,
         2, 1, 1), (8, 1, 1, 1)],
            key=str)),
    ("stages that layers do not fill", lambda: tried("megatron", "pp", Pins(tp=1), model=replace(DENSE, num_layers=12)),
     [(1,), (2,), (4,)]),
    ("Megatron's long sequences", lambda: [tried("megatron", "cp cp_comm_type", Pins(tp=1, pp=1), further,
        seq_length=16384)
                                           for further in (False, True)],
     [[(1, "all_gather"), (2, "all_gather"), (2, "p2p"), (4, "all_gather"), (4, "p2p")], [(8, "all_gather"), (8,
         "p2p")]]),
    ("chunks of a sequence", lambda: tried("megatron", "cp", Pins(tp=1, pp=1), True, seq_length=1028), [(2,)]),
    ("pinned context", lambda: [tried("megatron", "cp cp_comm_type", Pins(tp=1, pp=1, **more), further) for more,
        further in (
        ({"cp": 2, "cp_comm_type": "p2p"}, False), ({"cp": 2}, True))], [[(2, "p2p")], []]),
    ("Megatron on one GPU", lambda: [tried("megatron", "tp", each, machines=ONE) for each in (None,
        Pins(engine="megatron"), Pins(tp=2))],
     [[], [(1,)], [(2,)]]),
    ("Megatron's optimizer", lambda: [tried("megatron", "zero_stage", Pins(tp=1, pp=1),
        optimizer=OptimizerSpec(name=each))
                                      for each in ("adamw", "sgd")] + [tried("megatron", "zero_stage", Pins(tp=1, pp=1,
                                      zero_stage=0))],
     [[(1,)], [(0,)], [(0,)]]),
    ("sequence parallelism", lambda: [tried("megatron", "tp cp sp", Pins(pp=1, **more), seq_length=size) for more,
        size in (
        ({"tp": 8}, 1020), ({"tp": 4, "cp": 2}, 1028), ({"tp": 2, "sp": False}, 1024), ({"tp": 1}, 1024))],
     [[(8, 1, False)], [(4, 2, False)], [(2, 1, False)], [(1, 1, False)]]),
    ("implementations", lambda: [tried("megatron", "implementation", Pins(tp=1, pp=1),
        precision=each) for each in ("bf16", "fp8")],
     [[("local",)], [("transformer_engine",)]]),
    ("recompute", lambda: [tried("megatron", "recompute", Pins(tp=1, pp=1, **more), model=model) for more, model in (
        ({}, DENSE), ({"cp": 2}, DENSE), ({}, GEMMA), ({"recompute": "full"}, DENSE))],
     [[("full",), ("none",)], *[[("full",), ("none",), ("selective",)]] * 2, [("full",)]]),
    ("further layouts begin with full recompute", lambda: [list(candidates._recompute(Pins(), each,
        True)) for each in (False, True)],
     [["none", "selective", "full"], ["full", "selective", "none"]]),
    # (ep, etp): whole experts, or without expert parallelism as all other layers.
    ("experts", lambda: [candidates._experts(model, pins, tp, ranks) for model, pins, tp, ranks in (
        (DENSE, Pins(), 2, 8), (DENSE, Pins(ep=2, etp=4), 2, 8), (EXPERTS, Pins(), 2, 8), (EXPERTS, Pins(ep=4), 2, 8),
        (EXPERTS, Pins(etp=2), 4, 3))],
     [[(1, 1)], [(2, 4)], [(1, 2), (2, 1), (4, 1)], [(4, 1)], [(1, 2), (3, 2)]]),
    # With a layer fewer at both ends 126 make 16 stages; 61 make 3, fourteen times 4, and 2.
    ("ends", lambda: [candidates._ends(replace(DENSE, num_layers=layers), pins, pp) for layers, pins, pp in (
        (126, Pins(), 16), (61, Pins(), 16), (6, Pins(), 2), (6, Pins(), 8), (5, Pins(), 4), (6,
        Pins(first_stage_layers=2), 4),
        (6, Pins(last_stage_layers=2), 4))],
     [(7, 7), (3, 2), (None, None), (None, None), (None, None),
      (2, None), (None, 2)]),
    ("chunks", lambda: [candidates._virtual(replace(DENSE, num_layers=layers), pins, pp, first) for layers, pins, pp,
        first in (
        (12, Pins(), 2, None), (12, Pins(vp=3), 2, None), (12, Pins(), 1, None), (126, Pins(), 16, 7), (61, Pins(), 16,
        3),
        (12, Pins(first_stage_layers=2), 3, 2))], [[1, 2, 3, 6], [3], [1], [1, 2, 4, 8], [1], [1, 2, 4]]),
    ("what needs too much is left out", lambda: len(list(layouts(request(Pins(tp=1, pp=1)), "megatron",
        most_gib=0.001))), 0),
    ("layouts that are too slow", lambda: sorted({each.micro_batch_size for each in layouts(request(Pins(tp=1, pp=1)),
        "megatron",
        too_slow=TooSlow(lambda layout: layout.micro_batch_size < 2))}), [2]),
    ("divisors", lambda: [divisors(12), divisors(49), divisors(1), one_of([1, 2, 4]), one_of([3])], [[1, 2, 3, 4, 6,
        12], [1, 7, 49], [1], "1, 2 or 4", "3"]),
]  # fmt: skip


WHOLE = torch()


def candidate(seconds: float | None, gib: float = 9.0, layout: Layout = WHOLE, **more: Any) -> Candidate:
    """A layout with its memory and step."""
    return Candidate(layout.but(**more), gib, seconds)


Z2, Z3, M = deepspeed(zero_stage=2, dp=8), deepspeed(zero_stage=3, dp=8), megatron(dp=8)
OVER = deepspeed(zero_stage=3, tp=2).but(implementation="local")
SEARCH: Rows = [
    ("engines, simplest first", lambda: [engine_simplicity(each) for each in (torch(), Z2, M, OVER, torch(tp=2))], [0,
        1, 2, 3, 3]),
    # Each field in its place: host before disks, stages, splits, ring, experts, chunks, recompute, ZeRO, savers, rows.
    ("simplicity", lambda: simplicity(megatron(tp=2, cp=3, pp=5, ep=7, vp=11, cp_comm_type="p2p", recompute="selective",
                                               offload_optimizer="cpu", micro_batch_size=13)),
     (2, 1, 5, 6, 1, 7, 11, 1, 1, 1, 0, 13)),
    ("simplicity of savers", lambda: simplicity(deepspeed(zero_stage=3, zero_hpz=8, offload_optimizer="nvme",
        offload_param="cpu",
        recompute="full", chunked_loss=True, activation_offloading=True, tiled_mlp=True, compile_layers=True)),
     (1, 3, 1, 1, 0, 1, 1, 2, 3, 8, 4, 1)),
    ("the simplest of those equally fast", lambda: [getattr(_best(each), "step_time_s", None) for each in (
        (candidate(1.0, layout=M), candidate(1.01, layout=Z2)), (candidate(1.0, layout=M), candidate(1.0101,
        layout=Z2)),
        (candidate(1.001, layout=M), candidate(1.0, layout=M)), (candidate(None), candidate(2.0, layout=M)),
        (candidate(None),), ())],
     [1.01, 1.0, 1.0, 2.0, None, None]),
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
        objective=objective)) is not None for group in LAST_RESORTS for each in group]
                              for pins, objective in ((Pins(), "pretrain"), (Pins(), "sft"), (Pins(engine="torch"),
                              "pretrain"), (Pins(
                                  activation_offloading=True), "pretrain"), (Pins(engine="megatron",
                                  offload_optimizer="cpu"), "pretrain"))],
     [[True] * 4, [True, True, False, True], [False, True, False, False], [True, False, True, True],
      [True, True, True, False]]),
    ("a pinned share", lambda: [ON_HOST.added_to(request(Pins(engine="megatron", offload_optimizer="cpu",
        optimizer_offload_fraction=0.5))),
                                ON_HOST.added_to(request()).pins.optimizer_offload_fraction], [None, 0.25]),
    ("what forbids it", lambda: [each.forbidden_by for group in LAST_RESORTS for each in group],
     ["layout.offload_optimizer=none", "layout.activation_offloading=false",
      *["layout.optimizer_state_dtype=fp32"] * 2]),
    ("without loss", lambda: [without_loss(each).optimizer_state_dtype for each in (Pins(),
        Pins(optimizer_state_dtype="bf16"))], ["fp32", "bf16"]),
    ("balancing as published", lambda: [getattr(request_for(replace(EXPERTS, family=family, num_shared_experts=0,
        first_dense_layers=0), NODE,
        job(**more)).job.balancing, "moe_aux_loss_coeff", None) for family, more in (
            ("mixtral", {}), ("mixtral", {"objective": "sft"}), ("mixtral", {"lora": LORA}), ("qwen3_moe", {}))],
     [0.02, None, None, 0.001]),
    ("tokens of pretraining", lambda: [request_for(DENSE, NODE, job(**more)).job.total_tokens for more in ({},
        {"objective": "sft"})], [10**11, None]),
]  # fmt: skip


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
    ("why an engine", lambda: [decisions._reason((candidate(1.0, layout=a), candidate(None)), candidate(seconds,
        layout=b)) for a, seconds, b in (
        (M, 1.0, M), (M, 1.005, M), (M, 1.005, Z2), (OVER, 1.005, torch(tp=2)))],
     ["the fastest that fits",
         "the fastest engine; this layout is 0.5% slower than its fastest, but simpler or smaller (differences under "
      "1% are within the model's error)", "the simplest engine within 1% of the fastest (0.5% slower than megatron)",
      "0.5% slower than deepspeed over megatron, but simpler or smaller"]),
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
]  # fmt: skip


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
    ("engines that were weighed", lambda: decisions._engine(request(), SearchResult(None, (
        candidate(1.0, layout=M), candidate(2.0, layout=Z2), candidate(3.0, layout=Z2), candidate(None, 100.0)), False),
        candidate(1.0, layout=M)).rejected,
     [f"{describe(torch())}: needs 100.0 GiB, {100 - usable_gib(NODE.gpu):.1f} too many",
         f"{describe(Z2)}: +100.0%, 2 s a step, 9.0 GiB"]),
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

NAMED = replace(NODE, name="mine", host_ram_gib=1000.0, nvme_gib=100.0)


def changes(of: Callable[..., Any], *more: Any, **asked: Any) -> list[tuple[Any, ...]]:
    """(kind, factor, words) of the changes that are proposed."""
    return [(each.kind, each.factor, each.text) for each in of(request(**asked), *more)]


SHORT = deepspeed(zero_stage=3, dp=8, offload_optimizer="cpu")
NEEDED = host_ram_gib_per_node(work(SHORT))
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
        four_bit=each))[3:] for each in (False, True)],
     [[("lora", 1, "--qlora (or job.lora.four_bit=true): adapters on 4-bit weights instead of adapters")],
      [("lora", 1, "--lora (or job.lora.four_bit=false): adapters instead of adapters on 4-bit weights")]]),
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
        each.cluster.gpus_per_node) for each in fewer_gpus._halved(request(machines=replace(NODES, num_nodes=4)))],
     [(2, 8), (1, 8), (1, 4), (1, 2), (1, 1)]),
    ("engines that cannot", lambda: [sorted(infeasible._able(each)) for each in (
        {"torch": (infeasible.Violation("flag_of_engine", ""),), "megatron": (infeasible.Violation("batch", ""),)},
        {"deepspeed": (infeasible.Violation("deepspeed_pipeline", ""),)})], [["megatron"], ["deepspeed"]]),
]  # fmt: skip


def node(goal: Any = "gpus", name: str = "p4d.24xlarge", tokens: int = 10**12, **limits: Any) -> Any:
    """Nodes of a type under constraints."""
    return cluster_selection._NodeType(
        DENSE,
        job(seq_length=1024, total_tokens=tokens),
        Pins(),
        Constraints(goal=goal, **limits),
        name,
        calibration.NONE,
    )


A100 = cluster("p4d.24xlarge:1")
NODE_S = 1e12 * model_flops_per_token(DENSE, 1024) / (8 * peak_flops_per_s(A100.gpu, "bf16") * 0.65)
"""Seconds of one node at an MFU of 0.65."""
PRICE = A100.price_per_node_hour_usd or 0.0
DAYS = NODE_S / 86400
NUMBERS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]


def best_of(goal: Any, times: dict[int, float | None], limit: float = math.inf, **limits: Any) -> list[Any]:
    """(nodes, words of a miss, nodes that were searched), where so many nodes take so long."""
    each, asked = node(goal, **limits), []

    def option(nodes: int, _: Any) -> tuple[ClusterOption | None, Any]:
        asked.append(nodes)
        days = times.get(nodes, 1e3)
        if days is None:
            return None, cluster_selection._Miss(1.0 / nodes, f"{nodes} miss")
        return ClusterOption(replace(A100, num_nodes=nodes), M, days, days * nodes), None

    each._option = option
    found, miss = each.best(limit, {})
    return [found and found.cluster.num_nodes, miss and miss.text, asked]


CLUSTERS: Rows = [
    ("numbers of nodes", lambda: [node(**limits).numbers() for limits in ({}, {"max_gpus": 100}, {"max_gpus": 7},
        {"deadline_days": DAYS / 5})],
     [NUMBERS, [1, 2, 3, 4, 6, 8, 12], [], [each for each in NUMBERS if each >= 5]]),
    ("a node without a fabric", lambda: node(name="workstation-rtx-4090").numbers(), [1]),
    ("lower bounds", lambda: [node(each, max_gpus=100, deadline_days=DAYS / 2.5).ideal for each in ("gpus", "money",
        "time")],
     [24, PRICE * NODE_S / 3600, DAYS / 12]),
    ("no number is possible", lambda: node(max_gpus=7).ideal, math.inf),
    ("cost of no price", lambda: node(name="dgx-h100").ideal_usd, math.inf),
    # The fewest that will do; the cheapest until three in a row are no better; the fastest from the most on.
    ("the fewest", lambda: best_of("gpus", {1: None, 2: None, 3: 5.0}), [3, "2 miss", [1, 2, 3]]),
    ("no more than twice the best", lambda: best_of("gpus", {}, limit=8.0, max_gpus=64), [1, None, [1]]),
    ("beyond the best", lambda: best_of("gpus", dict.fromkeys(NUMBERS), limit=24.0), [None, "3 miss", [1, 2, 3]]),
    ("the cheapest", lambda: best_of("money", {1: 10.0, 2: 6.0, 3: 3.0, 4: 9.0, 6: 9.0, 8: 9.0}), [3, None, [1, 2, 3, 4,
        6, 8]]),
    ("the fastest", lambda: best_of("time", {8: 3.0, 6: 1.0, 4: 2.0, 3: 5.0, 2: 5.0}, max_gpus=64), [6, None, [8, 6, 4,
        3, 2]]),
    ("hopeless", lambda: best_of("time", {}, limit=DAYS / 3000), [None, None, []]),
    ("too dear at best", lambda: best_of("gpus", {}, budget_usd=1.0), [
        None, f"p4d.24xlarge: ${PRICE * NODE_S / 3600:,.0f} at 65% MFU already, above the budget of $1", []]),
    ("too few at best", lambda: best_of("gpus", {}, max_gpus=16, deadline_days=DAYS / 4), [
        None, f"2 x p4d.24xlarge: {human_seconds(NODE_S / 2)} at 65% MFU already, "
         f"after the deadline of {DAYS / 4:g} days", []]),
    ("a part of a node", lambda: best_of("gpus", {}, max_gpus=7, deadline_days=DAYS / 4)[1],
     f"1 x p4d.24xlarge: {human_seconds(NODE_S)} at 65% MFU already, after the deadline of {DAYS / 4:g} days"),
    ("too few GPUs", lambda: best_of("gpus", {}, max_gpus=7), [None, "p4d.24xlarge: 8 GPUs a node, at most 7 wanted",
        []]),
    ("order of options", lambda: [cluster_selection._rank(ClusterOption(A100, M, 3.0, each), goal) for goal, each in (
        ("gpus", 9.0), ("money", 9.0), ("money", None), ("time", 9.0))], [(8, 3), (9, 3), (math.inf, 3), (3, 3)]),
    ("types with a price", lambda: [("dgx-h100" in cluster_selection._types(each),
        "p4d.24xlarge" in cluster_selection._types(each)) for each in (
        Constraints(), Constraints(goal="money"), Constraints(budget_usd=9.0))], [(True, True), (False, True), (False,
        True)]),
    ("a table", lambda: render_options([ClusterOption(replace(A100, num_nodes=4), M, 3.25, None), ClusterOption(A100, M,
        1.0, 1234.0)]).splitlines()[1:],
     [f"{32:>6}  {'4 x p4d.24xlarge (A100-40)':32} {'3.2':>7} {'no price known':>14}  {describe(M)}",
      f"{8:>6}  {'1 x p4d.24xlarge (A100-40)':32} {'1.0':>7} {'1,234':>14}  {describe(M)}"]),
]  # fmt: skip

PLAN = make_plan(
    DENSE,
    cluster("32xH100"),
    job(seq_length=1024, global_batch_size=96),
    Pins(engine="deepspeed", zero_stage=2, micro_batch_size=1),
)
PLACE = "dgx-h100 H100"
RAN = {
    "torch huggingface, bf16, dense": 1.1,
    "megatron local, fp8, dense": 1.2,
    "megatron local, bf16, experts": 1.3,
    "deepspeed local, fp32, experts": 1.4,
}


def nearest(layout: Layout, model: Any = DENSE, **more: Any) -> float:
    """Ratio that a kind without runs takes."""
    rows = {f"{PLACE}, {name}": Residual(ratio, 5.0, 2) for name, ratio in RAN.items()} | {
        "other H100, megatron local, bf16, dense": Residual(9.0, 0, 1)
    }
    found = Calibration(rows).of(work(layout, model, **more))
    assert found.extra_gib == (0 if found.carried_from else 5)
    return found.step_time_factor


def learned(tmp: Path, known: Calibration, **measured: Any) -> Residual:
    """What one more run teaches."""
    path = tmp / "summary.json"
    path.write_text(json.dumps(measured))
    return calibration.learn(PLAN, path, known).residuals[calibration.kind(PLAN.workload)]


def run(ramp: tuple[int, int, int] | None = None, **more: Any) -> RunSpec:
    """A run of rows, whose batch grows from, by, over so many samples."""
    schedule = ScheduleSpec(
        batch_ramp=ramp and BatchRampSpec(start=ramp[0], increment=ramp[1], samples=ramp[2]), warmup_steps=0
    )
    return RunSpec(data=DataSpec(train="rows"), schedule=schedule, **more)


def steps(the_run: RunSpec, epoch: Epoch | None = None, **the_job: Any) -> tuple[int, int]:
    """Of 96 sequences of 1,024 tokens."""
    return length.length(replace(PLAN, job=job(seq_length=1024, global_batch_size=96, **the_job)), the_run, epoch)


def ramped(start: int = 4, increment: int = 4, **layout: int) -> str:
    """Why a ramp to 96 sequences on four data-parallel ranks is refused; empty where it is not."""
    shape = ScheduleSpec(batch_ramp=BatchRampSpec(start=start, increment=increment, samples=192))
    try:
        schedule.check_ramp(
            replace(PLAN, layout=megatron(dp=4, gradient_accumulation_steps=24, **layout)),
            RunSpec(data=DataSpec(train="rows"), schedule=shape),
        )
    except SpecError as refused:
        return str(refused)
    return ""


EPOCH = Epoch(samples=1000, tokens=500_000)
S = ScheduleSpec(kind="linear", warmup_steps=4, min_ratio=0.1)


def rate(seen: int, kind: Any = "linear", **more: Any) -> float:
    """Learning rate over its peak of 2, in a run of 100 steps of 10."""
    shape = replace(S, kind=kind, **{name: more.pop(name) for name in list(more) if name in vars(S)})
    return schedule.learning_rate(seen, peak=2.0, schedule=shape, total_steps=100, global_batch_size=10, **more) / 2


RUNS: Rows = [
    ("the most similar kind", lambda: [nearest(each, model, **more) for each, model, more in (
        (torch(), DENSE, {}), (Z2, DENSE, {}), (M, DENSE, {}), (M, EXPERTS, {"precision": "fp32"}),
        (megatron(implementation="transformer_engine"), DENSE, {}),
        (deepspeed(tp=2).but(implementation="local"), DENSE, {"precision": "fp32"}))], [1.1, 1.1, 1.3, 1.4, 1.1, 1.4]),
    ("nothing known here", lambda: [Calibration({}).of(work(M)),
        Calibration({"other H100, megatron local, bf16, dense": Residual(9.0, 0, 1)}).of(work(M))],
     [Residual(), Residual()]),
    ("kinds", lambda: [calibration.kind(work(each, model, **more)) for each, model, more in ((M, DENSE, {}), (Z2,
        EXPERTS, {"precision": "fp32"}))],
     [f"{PLACE}, megatron local, bf16, dense", f"{PLACE}, deepspeed huggingface, fp32, experts"]),
    ("likeness", lambda: calibration._likeness(["megatron local", "bf16", "dense"], ["deepspeed local", "bf16",
        "experts"]), (True, True, False, False)),
    ("a plan on fewer nodes", lambda: [elastic.legal_nodes(PLAN), (smaller := elastic.on_nodes(PLAN, 3)).layout.dp,
        smaller.layout.gradient_accumulation_steps,
                                       smaller.cluster.num_nodes,
                                       smaller.predicted.step_time_s > PLAN.predicted.step_time_s,
                                       elastic.on_nodes(PLAN, 4) is PLAN],
     [(1, 2, 3, 4), 24, 4, 3, True, True]),
    ("no plan on fewer nodes", lambda: [elastic._workload(each, nodes) for each, nodes in (
        (PLAN, 0), (PLAN, 5), (replace(PLAN, layout=PLAN.layout.but(gradient_accumulation_steps=1)), 3), (replace(
            PLAN, layout=PLAN.layout.but(tp=16, dp=2)), 1), (replace(PLAN,
            layout=PLAN.layout.but(gradient_accumulation_steps=6)), 2))],
     ["must be from 1 to 4", "must be from 1 to 4", "global_batch_size=32 is no multiple of micro_batch_size=1 · dp=24",
      "8 GPUs are no multiple of the 16 that share one replica",
      "micro_batch_size·gradient_accumulation_steps·dp=192 is not global_batch_size=96; use "
      "gradient_accumulation_steps=6"]),
    # A twentieth of the memory is not usable: 1.02 times the need is too little, 1.06 times is enough.
    ("no memory on fewer nodes", lambda: [isinstance(elastic._workload(replace(PLAN, cluster=replace(PLAN.cluster,
        gpu=replace(
        PLAN.cluster.gpu, memory_gib=each * peak_gib(PLAN.workload.with_layout(PLAN.layout.but(
            dp=16, gradient_accumulation_steps=6)))))), 2), str) for each in (1.02, 1.06)], [True, False]),
    ("the front of a comparison", lambda: [each.name for each in Comparison(request(), tuple(ComparedLayout(name, M,
        gib, seconds, fits) for name, gib, seconds, fits in (
        ("slow and small", 1.0, 9.0, True), ("dominated", 5.0, 5.0, True), ("fast", 8.0, 2.0, True), ("too large", 9.0,
        1.0, False), ("middle", 4.0, 4.0, True),
        ("equal", 4.0, 6.0, True), ("as fast", 9.0, 2.0, True))), None).pareto_front()], ["fast", "middle",
        "slow and small"]),
    # Steps: run.steps; whole batches of tokens; epochs with a whole last step; ramps of growing batches.
    ("lengths", lambda: [steps(run(steps=7)), steps(run(), total_tokens=96 * 1024 * 3 + 1), steps(run(),
        total_tokens=5), steps(run(), EPOCH, epochs=1.0),
                         steps(run(), EPOCH, epochs=0.1), steps(run(), EPOCH, objective="sft", total_tokens=250_000),
                         steps(run(), EPOCH, epochs=0.096),
                         steps(run(), EPOCH, epochs=0.097)],
     [(7, 672), (3, 288), (1, 96), (11, 1056), (2, 192), (5, 480), (1, 96), (2, 192)]),
    # 32 · 3 samples at 32, then 64: 96 + 128 are at least 192.
    ("lengths of a ramp", lambda: [steps(run((32, 32, 192), steps=2)), steps(run((32, 32, 192), steps=9)),
        steps(run((32, 32, 192)), total_tokens=1024 * 500),
                                   steps(run((32, 32, 192)), total_tokens=1024 * 50), steps(run((32, 32, 192)), EPOCH,
                                   epochs=0.05)],
     [(2, 64), (9, 3 * 32 + 2 * 64 + 4 * 96), (7, 224 + 2 * 96), (1, 32), (2, 64)]),
    ("batches of a ramp", lambda: [[schedule.batch_size(each, BatchRampSpec(start=32, increment=32, samples=192),
        96) for each in (0, 95, 96, 191, 192)],
                                   schedule.batch_size(5, None, 96), list(schedule.ramped(BatchRampSpec(start=32,
                                   increment=32, samples=192), 96))],
     [[32, 32, 64, 64, 96], 96, [32, 32, 32, 64, 64]]),
    ("sizes of a ramp", lambda: [ramped(pp=2), ramped(pp=2, vp=2), ramped(start=97), ramped(increment=40)],
     ["", "run.schedule.batch_ramp.start=4 is not a multiple of micro_batch_size · dp · pp (an interleaved "
          "pipeline) = 8; use 8 or 8",
      "run.schedule.batch_ramp.start=97 is not a multiple of micro_batch_size · dp = 4; use 96 or 100",
      "run.schedule.batch_ramp goes from 4 by 40, which does not meet job.global_batch_size=96; choose an increment "
      "that divides the difference"]),
    # Warm-up over 40 samples; then from 1 to 0.1 over the other 960.
    ("rates", lambda: [rate(each) for each in (10, 39, 40, 520, 1000, 2000)], [0.25, 39 / 40, 1, 0.55, 0.1, 0.1]),
    ("shapes", lambda: [rate(280, each) for each in ("cosine", "constant", "inverse_sqrt")],
     [0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, 1, math.sqrt(40 / 280)]),
    ("a floor of the root", lambda: [rate(1000, "inverse_sqrt"), rate(1000, "inverse_sqrt", min_ratio=0.5)], [0.2,
        0.5]),
    ("stable, then down", lambda: [rate(each, "warmup_stable_decay", decay_steps=20, decay_style=style) for each,
        style in (
        (800, "linear"), (850, "linear"), (950, "exponential"), (950, "minus_sqrt"), (1000, "linear"))],
     [1, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * (2 * 0.5**0.75 - 1), 0.1 + 0.9 * (1 - math.sqrt(0.75)), 0.1]),
    ("a tenth by default", lambda: rate(950, "warmup_stable_decay"), 0.1 + 0.9 * (2 * 0.5**0.5 - 1)),
    ("restarts", lambda: [rate(each, "cosine_with_restarts", num_cycles=2) for each in (40, 280, 520, 1000)], [1, 0.55,
        1, 0.1]),
    ("a tenth of a short run", lambda: schedule.learning_rate(5, peak=2.0, schedule=S, total_steps=10,
        global_batch_size=10), 1.0),
    ("rates over a ramp", lambda: [rate(310, total_samples=600), rate(600, total_samples=600)],
        [0.1 + 0.9 * (600 - 310) / 560, 0.1]),
]  # fmt: skip


def noted(layout: Layout, model: Any = DENSE, machines: Any = NODE, **the_job: Any) -> list[tuple[str, str, str]]:
    """(rule, chosen, beginning of the reason) of the notes."""
    found = notes.notes(work(layout, model, machines, **the_job))
    return [(each.rule, each.chosen, each.why.partition(":")[0].partition(",")[0]) for each in found]


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
RIGHT_DDP = replace(work(torch()), job=job(seq_length=1024, global_batch_size=64), cluster=FAR, layout=torch(dp=64))
RIGHT_ZERO = replace(RIGHT_DDP, layout=deepspeed(dp=64, zero_stage=3))
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
    ("tensor parallelism over nodes",
        lambda: [[each.why.rpartition("; ")[2] for each in notes.notes(work(megatron(tp=tp), machines=machines))]
                                               for tp, machines in ((8, cluster("2x4xH100")), (6, cluster("2x4xH100")),
                                               (4, cluster("2x4xH100")), (
                                                   3, cluster("1x4xH100")))],
     [["layout.tp=4 stays inside a node"], ["layout.tp=2 stays inside a node"], [], []]),
    ("fp8", lambda: [[(each.rule, each.chosen, each.why[:24]) for each in notes._fp8(w)] for w in (
        RIGHT_FP8, replace(RIGHT_FP8, cluster=cluster("2xcpu")), work(megatron(dp=8), **FP8), work(torch(dp=8)))],
     [[("precision", "fp8", "linear layers of the blo")], [("precision", "fp8", "emulated, for a CPU has ")], [], []]),
    ("the same step in bf16", lambda: [each.rejected for each in notes._fp8(RIGHT_FP8)],
     [(f"bf16, the same layout: "
       f"{human_seconds(step_s(replace(RIGHT_FP8, job=replace(RIGHT_FP8.job, precision='bf16'))))} a step",)]),
    # On slow links every way to send less gains at least a twentieth; on one node none does.
    ("compression", lambda: [[line.partition(":")[0] for each in notes._compression(
        w) for line in each.rejected] for w in (
        RIGHT_DDP, RIGHT_ZERO, replace(RIGHT_DDP, cluster=replace(FAR, inter_node_gbytes_per_s=1e4)))],
     [["gradient_compression=bf16", "gradient_compression=powersgd"], [
         "zero_quantized_weights", "zero_quantized_weights and zero_quantized_gradients"], []]),
    ("ways to send less", lambda: [[name for name, _ in notes._compressed(each)] for each in (
        torch(gradient_compression="bf16"), deepspeed(zero_quantized_weights=True),
        deepspeed(zero_quantized_gradients=True))],
     [["zero_quantized_weights", "zero_quantized_weights and zero_quantized_gradients"], *[[
         "gradient_compression=bf16", "gradient_compression=powersgd"]] * 2]),
    ("what is sent", lambda: [(each.gradient_compression, each.zero_quantized_weights, each.zero_quantized_gradients)
                              for _, each in notes._compressed(Z3)],
     [("bf16", False, False), ("powersgd", False, False), ("none", True, False), ("none", True, True)]),
    ("why a last resort", lambda: [last_resort._reason(candidate(0.5), each) for each in (None, candidate(1.0,
        layout=M))],
     ["no other layout that kit tries fits", f"the fastest other layout takes 1,000 ms ({describe(M)})"]),
    ("seconds of offload", lambda: [last_resort._offload(request(), candidate(2.0, layout=each)) for each in (M,
        ON_CPU)],
     ["", f"Offload takes {human_seconds(StepTimer().components_s(request().workload(ON_CPU))['offload'])} of 2 s a "
          f"step. "]),
    ("last resorts that are taken unasked", lambda: [len(search._allowed(request(each))) for each in (
        Pins(), Pins(engine="torch"), Pins(implementation="local"), Pins(tp=2))], [3, 3, 3, 1]),
    ("engines on request", lambda: [[each.pins.engine for each in search._on_request(request(pins,
        machines=machines))] for pins, machines in (
        (None, NODE), (None, ONE), (TORCH, ONE))], [["torch", "deepspeed"], ["torch", "deepspeed", "megatron"], []]),
    ("corrected by earlier runs", lambda: [getattr(search.LayoutScorer(replace(request(), calibration=known)),
        name)(request().workload(M))
        / getattr(search.LayoutScorer(request()),
        name)(request().workload(M)) for known in (Calibration({f"{PLACE}, megatron local, bf16, dense": Residual(
            1.5, 0.0, 1)}),) for name in ("step_time_s", "least_s", "peak_gib")], [1.5, 1.5, 1.0]),
    ("memory of earlier runs", lambda: search.LayoutScorer(replace(request(),
        calibration=Calibration({f"{PLACE}, megatron local, bf16, dense": Residual(
        1.5, 2.0, 1)}))).peak_gib(request().workload(M)) - peak_gib(request().workload(M)), 2.0),
    ("a step of what fits", lambda: [search.LayoutScorer(request()).candidate(request().workload(M),
        each).step_time_s is None for each in (0.1, 99.0)],
     [True, False]),
    ("the nearest miss", lambda: [infeasible.nearest_miss(request(Pins(engine="megatron")), each) for each in (
        [candidate(None, layout=M.but(micro_batch_size=size)) for size in (8, 2, 4)], [])], [M.but(micro_batch_size=2),
        None]),
    ("pins in the way", lambda: [(each.kind, each.text, getattr(each.request.pins, each.kind),
        each.last_resorts) for each in infeasible._changes(
        request(Pins(tp=2, sp=True)), ()) if each.text.startswith("layout")], [("tp",
        "layout.tp left to the planner instead of 2", None, True), (
            "sp", "layout.sp left to the planner instead of True", None, True)]),
    ("larger GPUs that hold a layout", lambda: next((each.text, each.factor,
        len(each.among or ())) for each in infeasible._changes(
        request(), [candidate(None, 100.0), candidate(1.0, 1.0), candidate(None, 1e4)]) if each.kind == "gpu"),
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
    ("corrected predictions", lambda: [getattr(found := calibration.corrected(PLAN.predicted, Residual(2.0, 3.0, 2)),
        name) / getattr(PLAN.predicted, name)
                                       for name in ("step_time_s", "tokens_per_s", "mfu",
                                       "days")] + [found.peak_gib - PLAN.predicted.peak_gib],
     [2, 0.5, 0.5, 2, 3]),
    ("words of a correction", lambda: [calibration.corrected(PLAN.predicted, each).step_time_evidence for each in (
        Residual(2.0, 3.0, 2), Residual(1.5, 0.0, 1,
        "torch huggingface, bf16, dense"))] + [calibration.corrected(PLAN.predicted, Residual()) is PLAN.predicted],
     ["calibrated by 2 runs on this cluster: step x 2.00, +3.0 GiB",
         "calibrated by 1 run of torch huggingface, bf16, dense on this cluster: step x 1.50, "
      "memory as predicted", True]),
]  # fmt: skip


@by_hand(CANDIDATES, SEARCH, DESCRIBED, CHOICES, INFEASIBLE, CLUSTERS, RUNS, NOTES)
def test_value(computed: Callable[[], Any], derived: Any) -> None:
    assert flat(computed()) == pytest.approx(flat(derived), rel=1e-9)


SEARCHED = replace(A100, num_nodes=4, name="", source="", price_per_node_hour_usd=None, price_date=None)


@pytest.mark.parametrize(
    ("found", "limits", "said"),
    [
        (candidate(2.0, layout=megatron(dp=32)), {}, ""),
        (
            candidate(2.0, layout=megatron(dp=32)),
            {"deadline_days": 1.0},
            "4 x p4d.24xlarge: {took}, after the deadline of 1 days",
        ),
        (
            candidate(2.0, layout=megatron(dp=32)),
            {"budget_usd": 1.0},
            "4 x p4d.24xlarge: ${cost:,.0f}, above the budget of $1",
        ),
        (None, {}, "4 x p4d.24xlarge: does not fit without loss of accuracy, or no layout is legal"),
        (candidate(1e12, layout=megatron(dp=32)), {}, "4 x p4d.24xlarge: loses all its time to failures"),
    ],
    ids=["found", "late", "dear", "nothing fits", "failures"],
)
def test_an_option_has_the_days_and_the_cost_of_its_step(found: Any, limits: dict[str, float], said: str) -> None:
    each = node(**limits)
    option, miss = each._option(4, {SEARCHED: found})
    at = replace(A100, num_nodes=4)
    goodput = operation(Workload(DENSE, at, each.job, megatron(dp=32)), 2.0).goodput
    seconds = 1e12 / (128 * 1024) * 2.0 / goodput
    cost = PRICE * 4 * seconds / 3600
    if not said:
        assert (option.days, option.cost_usd, miss) == (pytest.approx(seconds / 86400), pytest.approx(cost), None)
        assert (option.cluster, option.layout) == (at, megatron(dp=32))
        return
    assert (option, miss.text) == (None, said.format(took=human_seconds(seconds), cost=cost))
    times = {"deadline_days": seconds / 86400, "budget_usd": cost}.get(next(iter(limits), ""), math.inf)
    assert miss.times == pytest.approx(times)


def test_types_are_searched_from_the_best_bound_on_and_sorted_by_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told twice the best that was found before it."""
    nodes = {name: replace(A100, name=name) for name in ("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge")}
    usd = {"p4d.24xlarge": 9.0, "p4de.24xlarge": 4.0, "p5.48xlarge": 6.0}
    asked: list[tuple[str, float]] = []

    def best(self: Any, limit: float, searched: Any) -> Any:
        assert self.pins.optimizer_state_dtype == "fp32"  # no option loses accuracy
        asked.append((self.name, limit))
        miss = cluster_selection._Miss(usd[self.name], f"{self.name} misses")
        return (ClusterOption(nodes[self.name], M, 1.0, usd[self.name]), None) if usd[self.name] < 9 else (None, miss)

    monkeypatch.setattr(cluster_selection, "_types", lambda _: list(nodes))
    monkeypatch.setattr(cluster_selection._NodeType, "best", best)
    ask = (DENSE, job(seq_length=1024, total_tokens=10**12), Pins(), Constraints(goal="money"))
    found = cluster_selection.cluster_options(*ask)
    order = sorted(nodes, key=lambda name: node("money", name).ideal_usd)
    limits = {"p4d.24xlarge": math.inf, "p4de.24xlarge": math.inf, "p5.48xlarge": math.inf}
    best_yet = math.inf
    for name in order:
        limits[name], best_yet = 2 * best_yet, min(best_yet, usd[name] if usd[name] < 9 else math.inf)
    assert asked == [(name, limits[name]) for name in order]
    assert [option.cost_usd for option in found] == [4.0, 6.0]
    usd |= {"p4de.24xlarge": 19.0, "p5.48xlarge": 12.0}
    assert re.search(
        r"(?s)satisfies this\np4d\.24xlarge misses\np5\.48xlarge misses\np4de",
        refusal(PlanError, cluster_selection.cluster_options, *ask),
    )


def test_runs_of_a_kind_are_averaged(tmp_path: Path) -> None:
    predicted = PLAN.predicted
    one = learned(
        tmp_path,
        calibration.NONE,
        measured_step_time_s=2 * predicted.step_time_s,
        measured_memory_gib=predicted.peak_gib + 3,
    )
    assert flat(one) == pytest.approx([2.0, 3.0, 1, ""])
    known = Calibration({calibration.kind(PLAN.workload): one, "other": Residual(5.0, 5.0, 5)})
    two = learned(tmp_path, known, measured_step_time_s=predicted.step_time_s, measured_memory_is="peak allocated")
    assert flat(two) == pytest.approx([1.5, 3.0, 2, ""])
    on_cpu = learned(
        tmp_path,
        known,
        measured_step_time_s=predicted.step_time_s,
        measured_memory_gib=1.0,
        measured_memory_is="of the process",
    )
    assert flat(on_cpu) == pytest.approx([1.5, 3.0, 2, ""])
    memory = learned(tmp_path, known, measured_memory_gib=predicted.peak_gib + 1, measured_memory_is="peak allocated")
    assert flat(memory) == pytest.approx([2.0, 2.0, 2, ""])
    path = tmp_path / "kept.yaml"
    calibration.save(known, path)
    assert calibration.load(path) == known
    assert calibration.load(None) == calibration.NONE


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
        infeasible._Change(kind, price, factor, f"{kind} {size}", request(global_batch_size=abs(size)), None, size < 0)
        for kind, price, factor, size in made
    ]
    resorts: dict[int, bool] = {}

    def can_fit(asked: Request, among: Any, last_resorts: bool) -> bool:
        resorts[asked.job.global_batch_size] = last_resorts
        return asked.job.global_batch_size % 2 == 0

    monkeypatch.setattr(infeasible, "_changes", lambda *_: iter(all_of_them))
    monkeypatch.setattr(infeasible, "can_fit", can_fit)
    monkeypatch.setattr(infeasible, "_with_loss_of_accuracy", lambda _: iter(["lossy"]))
    first = ("tp 10", "pp -14", "lora 8", "host 16", "length 12")
    assert infeasible.changes_that_fit(request(), ()) == (*first, "lossy")
    assert (resorts[14], resorts[10]) == (True, False)
    assert infeasible.changes_that_fit(request(), (), last_resorts=False) == first
    assert resorts[14] is False
    all_of_them[:] = all_of_them[:4]
    assert infeasible.changes_that_fit(request(), (), last_resorts=False) == ("gpu 2", "nodes 6")


def test_the_fastest_of_fewer_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_s = {32: 0.9, 16: 0.5, 8: 0.7}

    def faster_than(asked: Request, most_s: float) -> Candidate | None:
        seconds = steps_s.get(asked.cluster.num_gpus, 9.0)
        return candidate(seconds) if seconds < most_s else None

    monkeypatch.setattr(fewer_gpus, "faster_than", faster_than)
    asked = request(machines=NODES, global_batch_size=64)
    (note,) = fewer_gpus.faster_with_fewer(asked, candidate(1.0, layout=torch(dp=64)))
    assert "16 take 500 ms a step, 64 take 1 s" in note.why
    assert list(fewer_gpus.faster_with_fewer(asked, candidate(0.4, layout=torch(dp=64)))) == []


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
    found = search._without_last_resorts(asked, scorer)
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
    chosen, quick = (best and candidate(2.02, layout=best)), candidate(1.5, layout=M)
    found = SearchResult(chosen, (candidate(2.0, layout=Z2), *([chosen] if chosen else ())), False)
    limits = []

    def faster_than(asked: Request, scorer: Any, most_s: float, most_gib: float) -> SearchResult | None:
        limits.append((asked.pins.offload_optimizer, most_s, most_gib))
        return SearchResult(quick, (quick,), False) if faster else None

    monkeypatch.setattr(search, "_faster_than", faster_than)
    result = search._or_on_host(request(pins, machines=machines), found)
    assert result == (
        SearchResult(quick, (*found.considered, quick), True, ON_HOST, found.considered[0]) if taken else found
    )
    assert not taken or limits == [("cpu", pytest.approx(2.0), usable_gib(machines.gpu))]
