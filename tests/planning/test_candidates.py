"""Layouts that are tried (kit/planner/candidates), each beside an answer that follows from its rule."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from kit.planner import candidates
from kit.planner.candidates import LowerBound, fast_paths, layouts
from kit.specs.job import OptimizerSpec
from kit.specs.layout import Pins, divisors
from kit.specs.text import one_of
from tests.planning.questions import LORA, ONE, TORCH, ZERO, request
from tests.planning.shapes import DENSE, EXPERTS, GEMMA, NODE, NODES, STACKS, Rows, by_hand
from tests.support.models import cluster

OFFLOADS = [("cpu", "none"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "none"), ("nvme", "cpu"), ("nvme", "nvme")]
SIZES = [1, 2, 4, 8, 16]


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
    ("whole weights on the host of several GPUs", lambda: sorted({(each.offload_param, each.offload_optimizer,
        each.zero_stage, each.chunked_loss) for each in layouts(request(TORCH), "torch", True)
        if each.offload_param == "cpu" and each.zero_stage == 3}),
     [("cpu", "cpu", 3, False), ("cpu", "cpu", 3, True)]),
    ("whole weights stay", lambda: tried("torch", "offload_param", TORCH, True, machines=ONE), [("none",)]),
    ("a pinned place", lambda: tried("torch", "offload_param", TORCH.but(offload_param="none"), True, machines=ONE,
        lora=LORA), [("none",)]),
    ("further layouts have whole layers", lambda: tried("torch", "tp cp", TORCH, True), [(1, 1)]),
    ("ranks of long sequences", lambda: [sorted({each.cp for each in layouts(request(pins, seq_length=size, **more),
        "torch", True)})
                                         for pins, size, more in (
        (TORCH, 65537, {}), (TORCH, 65536, {}), (TORCH, 65537, {"objective": "sft"}), (TORCH, 65537, {"lora": LORA}),
        (TORCH, 65537, {"objective": "dpo"}),
        (TORCH.but(cp=4), 65537, {}), (TORCH.but(zero_stage=2), 65537, {}), (TORCH.but(cp=1), 65537, {}),
        (TORCH.but(tp=2), 65537, {}),
        (TORCH.but(zero_stage=3, cp_comm_type="a2a"), 65537, {}))],
     [[1, 2, 4, 8], [1], [1, 2, 4, 8], [1, 2, 4, 8], [1], [4], [1], [1], [], [1, 2, 4, 8]]),
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
        bound=LowerBound(lambda layout: layout.micro_batch_size < 2))}), [2]),
    ("divisors", lambda: [divisors(12), divisors(49), divisors(1), one_of([1, 2, 4]), one_of([3])], [[1, 2, 3, 4, 6,
        12], [1, 7, 49], [1], "1, 2 or 4", "3"]),
]  # fmt: skip


test_value = by_hand(CANDIDATES)
