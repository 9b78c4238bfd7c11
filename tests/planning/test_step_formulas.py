"""Seconds of a step, counts of a rank and figures of a run, each beside a value derived by hand.

Pipelines: Narayanan et al. (arXiv 2104.04473, section 2.2) and megatron-core's schedules. Offload: ZeRO-Offload and
ZeRO-Infinity (arXiv 2101.06840, 2104.07857). LoRA: arXiv 2106.09685. Checkpoints: Young 1974.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from typing import Any

import pytest

from kit.cost import estimate
from kit.cost.estimate import cost_usd, predict
from kit.cost.hardware import matmul_s, overheads, shared, usable_gib
from kit.cost.memory.activations_huggingface import generation_bytes
from kit.cost.memory.peak import StageMemory, peak, peak_gib
from kit.cost.memory.states_and_buffers import least_megatron_gib
from kit.cost.model.flops import model_flops_per_token
from kit.cost.model.lora import adapted_layers, adapter_parameters_of, dora_sizes, linear_layers, named_layers
from kit.cost.model.params import count, dense_layer_matrices, rank_experts, rank_parameters
from kit.cost.model.pipeline import chunk_layers, in_flight, middle_stage_layers, stage_layers
from kit.cost.reliability import Operation, checkpoint_bytes, operation
from kit.cost.time import elementwise
from kit.cost.time.layer import LayerTime, embedding_s, head_s, layer_time
from kit.cost.time.step import Part, StepTimeModel, bubble_fraction
from kit.specs.job import GrpoSpec, LoraSpec, OptimizerSpec
from kit.specs.layout import Layout
from tests.planning.shapes import (
    DENSE,
    EXPERTS,
    GEMMA,
    GPT,
    LATENT,
    MIXED,
    NODE,
    NODES,
    STACKS,
    Rows,
    by_hand,
    work,
)  # fmt: skip
from tests.planning.shapes import (
    TOKENS as T,
)
from tests.planning.test_time_formulas import FAR, GPU, HOP, LAYER, NVLINK, PORT, ring, seen
from tests.support.models import cluster, deepspeed, job, megatron, torch

E, FP32, LORA = shared(), {"precision": "fp32"}, LoraSpec(rank=7, targets="attention")
TABLE = 5003 * 320
TOTAL = 6 * (LAYER + 640) + 2 * TABLE + 320
PCIE = 64e9 * E.host_link
FSDP, TE, Z3 = torch(zero_stage=3, dp=8), {"implementation": "transformer_engine"}, deepspeed(zero_stage=3)


def seconds(layout: Layout, *names: str, model: Any = DENSE, machines: Any = NODE, **job: Any) -> list[float]:
    """Components of a step on GPUs of ``GPU``'s rates."""
    found = StepTimeModel(GPU._replace(cluster=machines)).components_s(work(layout, model, machines, **job))
    return [found[name] for name in names] if names else [sum(found.values())]


def layer(layout: Layout, has_experts: bool = False, model: Any = DENSE, **job: Any) -> LayerTime:
    """Seconds of a layer."""
    return layer_time(GPU, work(layout, model, **job), has_experts)


def waits(each: LayerTime, again: float = 0.0, once: float = 1.0, hooks: tuple[float, float] = (0.0, 0.0)) -> float:
    """Seconds for which the GPU waits for launches, in forward and in backward."""
    ways = (
        once * each.launch_forward - each.forward,
        (each.launch_backward + again * each.launch_forward - each.backward - each.recompute),
    )
    return sum(max(0.0, way + more) for way, more in zip(ways, hooks, strict=True))


ONE, TWO = megatron(), megatron(pp=2, dp=4, gradient_accumulation_steps=4)
L, HEAD, LOOK_UP = layer(ONE), head_s(GPU, work(ONE)), embedding_s(GPU, work(ONE))
SUMS = 10 / 1e12
"""Seconds to add a gradient to its sum."""
STAGES = [3 * (LAYER + 640) + TABLE, 3 * (LAYER + 640) + 320 + TABLE]
PARTS = [
    3 * (L.forward + L.backward) + LOOK_UP + SUMS * STAGES[0],
    3 * (L.forward + L.backward) + sum(HEAD) + SUMS * STAGES[1],
]
NONE = Part(*[0.0] * 7)
MOE = layer(megatron(), True, EXPERTS)
STEPS: Rows = [
    ("one GPU", lambda: seconds(ONE, "compute", "launch", "recompute", "pipeline_bubble", "pipeline_transfer"),
     [6 * (L.forward + L.backward) + sum(HEAD) + LOOK_UP + SUMS * TOTAL, 6 * waits(L), 0, 0, 0]),
    ("micro batches", lambda: seconds(ONE.but(gradient_accumulation_steps=5), "compute", "launch"),
     [5 * each for each in seconds(ONE, "compute", "launch")]),
    ("recompute", lambda: seconds(ONE.but(recompute="full"), "recompute", "launch"),
     [6 * L.forward, 6 * waits(layer(ONE.but(recompute="full")), 1.0)]),
    ("launches of transformers again", lambda: seconds(torch(recompute="full"), "launch"),
     [6 * waits(layer(torch(recompute="full")), 2.0, 1.5)]),
    # ZeRO-3's hooks take 1.8 ms a pass of each layer; of one timer's layers, those of another stage have none.
    ("hooks", lambda: [found["launch"] for timer in (StepTimeModel(GPU),) for found in (
        timer.components_s(work(deepspeed(zero_stage=stage, recompute=each)))
        for stage, each in ((2, "none"), (3, "none"), (3, "full")))],
     [6 * waits(layer(Z3)), 6 * waits(layer(Z3), hooks=(1.8e-3, 1.8e-3)),
      6 * waits(layer(Z3.but(recompute="full")), 2.0, 1.5, (1.8e-3, 3.6e-3))]),
    # While it fills and drains, a micro batch passes the other stage; the slowest decides the rest.
    ("two stages", lambda: seconds(TWO, "compute", "launch", "pipeline_bubble"),
     [4 * max(PARTS), 4 * 3 * waits(L), min(PARTS) + 3 * waits(L)]),
    ("interleaved stages", lambda: seconds(TWO.but(vp=3), "pipeline_bubble"), [(min(PARTS) + 3 * waits(L)) / 3]),
    ("three stages", lambda: seconds(megatron(pp=3), "pipeline_bubble"),
     [4 * (L.forward + L.backward + waits(L)) + LOOK_UP + SUMS * (2 * (2 * LAYER + 1280) + TABLE)]),
    # The host waits for the routing: at least 0.3 of the launches of such a layer are in the open.
    ("experts", lambda: seconds(megatron(), "launch", model=EXPERTS),
     [2 * waits(layer(megatron(), False, EXPERTS)) + 5 * max(waits(MOE), 0.3 * 2.5 * MOE.launch_forward)]),
    ("heads of multi-token prediction", lambda: seconds(megatron(), "compute", model=replace(LATENT,
        mtp_num_layers=2))[0]
     - seconds(megatron(), "compute", model=LATENT)[0],
     2 * (sum(head_s(GPU, work(ONE, LATENT))) + layer(ONE, True, LATENT).forward + layer(ONE, True, LATENT).backward)
     + SUMS * (count(replace(LATENT, mtp_num_layers=2)).total - count(LATENT).total)),
    ("a bound of a step", lambda: StepTimeModel(GPU).layers_s(work(TWO)),
        4 * 6 * (L.forward + L.backward + waits(L)) / 2),
    ("a bound with experts", lambda: StepTimeModel(GPU).layers_s(work(ONE.but(recompute="full"), EXPERTS)),
     2 * StepTimeModel(GPU)._layer(work(ONE.but(recompute="full"), EXPERTS), False).total
     + 5 * StepTimeModel(GPU)._layer(work(ONE.but(recompute="full"), EXPERTS), True).total),
    # A micro batch's activations forth and their gradients back, and then the next launches.
    ("transfers on a node", lambda: StepTimeModel(GPU).transfer_s(work(TWO), NONE),
     2 * (T * 640 / NVLINK + HOP) + 40 * 8e-6),
    ("transfers between nodes", lambda: StepTimeModel(GPU._replace(cluster=NODES)).transfer_s(
        work(megatron(pp=2, tp=2, dp=4, sp=True), machines=NODES), NONE), 2 * (T / 2 * 640 / PORT + FAR) + 40 * 8e-6),
    ("transfers beside experts", lambda: StepTimeModel(GPU).transfer_s(work(TWO, EXPERTS), NONE),
     2 * (T * 640 / NVLINK + HOP) + (40 + 150 + 144) * 8e-6),
    ("interleaved transfers", lambda: [StepTimeModel(GPU).transfer_s(work(TWO.but(vp=3)), NONE._replace(forward=each))
                                       for each in (0.0, 1e-5, 1.0)],
     [6 * (T * 640 / NVLINK + HOP), 6 * (T * 640 / NVLINK + HOP) - E.overlap * 1e-5, 0]),
    ("transfers of a step", lambda: seconds(TWO, "pipeline_transfer")[0],
        4 * (2 * (T * 640 / NVLINK + HOP) + 40 * 8e-6)),
    ("a forward's window", lambda: (Part(1, 2, 4, 9, 16, 32, 64).forward_window, Part(1, 2, 3, 4, 5, 6, 7).times(2),
                                    Part(1, 2, 3, 4, 5, 6, 7).plus(Part(*[10] * 7))),
     (4, (2, 4, 6, 8, 10, 12, 14), (11, 12, 13, 14, 15, 16, 17))),
    # At most nine gradients of a layer are reduced alone; a bucket that fills the link is the measure.
    ("small buckets", lambda: [StepTimeModel(GPU)._small_buckets_s(work(deepspeed(
        dp=8, zero_stage=stage, gradient_accumulation_steps=3, reduce_bucket_size=size))) for stage, size in (
            (1, 10**5), (2, 10**6), (2, 10**9), (2, 0))],
     [(54 - TOTAL / 40_162_500) * 7 * HOP, 3 * (TOTAL / 1e6 - TOTAL / 40_162_500) * 7 * HOP, 0,
      3 * (54 - TOTAL / 40_162_500) * 7 * HOP]),
    ("small buckets over two", lambda: StepTimeModel(GPU)._small_buckets_s(work(deepspeed(
        dp=4, tp=2, zero_stage=1, reduce_bucket_size=10**6))), (TOTAL / 2e6 - TOTAL / 2 / 17_212_500) * 3 * HOP),
    ("optimizer", lambda: [seconds(each, "optimizer")[0] for each in (ONE, torch(dp=8), FSDP, megatron(dp=8))],
     [42 * TOTAL / 1e12, 42 * TOTAL / 1e12, 42 * TOTAL / 8e12, 42 * TOTAL / 8e12]),
    ("scoring", lambda: [seconds(each, "scoring", objective="kto")[0] for each in (torch(),)],
     [3 * (6 * (L_HF := layer(torch(), objective="kto")).forward + head_s(GPU, work(torch(), objective="kto"))[0]
           + 6 * waits(L_HF) / 3)]),
    ("scoring gathers", lambda: seconds(FSDP.but(gradient_accumulation_steps=2), "scoring", objective="dpo")[0]
     / seconds(FSDP, "scoring", objective="dpo")[0], 2),
    ("no scoring", lambda: [sorted(StepTimeModel(GPU).components_s(work(torch(), objective=each)))[-4:] for each in (
        "sft", "grpo")], [["pipeline_bubble", "pipeline_transfer", "recompute", "tensor_parallel"],
                          ["pipeline_transfer", "recompute", "scoring", "tensor_parallel"]]),
    ("generation", lambda: [name in StepTimeModel(GPU).components_s(work(torch(), objective=each)) for name, each in (
        ("generation", "grpo"), ("generation", "dpo"))], [True, False]),
]  # fmt: skip

Z = {stage: deepspeed(zero_stage=stage, dp=8, offload_optimizer="cpu") for stage in (2, 3)}
COMPONENTS = {"compute": 3e-3, "recompute": 1e-3, "optimizer": 0.5, "offload": 0.0}


def offloaded(layout: Layout, compute: bool = True, machines: Any = NODE, **job: Any) -> list[float]:
    """(offload, optimizer) beside 4 ms of compute a micro batch, or none."""
    w, found = work(layout, machines=machines, **job), dict(COMPONENTS)
    steps = layout.gradient_accumulation_steps
    found |= {name: steps * found[name] * compute for name in ("compute", "recompute")}
    result = StepTimeModel(GPU).with_offload(w, w.parameters[0], found)
    return [result["offload"], result["optimizer"]]


COPY = 640 * T / PCIE
DISKS = replace(NODE, nvme_gib=1e4, nvme_gbytes_per_s=7.0)
SHARD = TOTAL / 8
HOST = 614.4e9 * 0.85


def stepped(parameters: float, bytes_each: float) -> float:
    """Seconds in which a node's host steps parameters: Adam 28 bytes, clipping 8, the cast 6 and its copy 2; at stage 3
    6 more, and 12 more in fp16."""
    return parameters * bytes_each / HOST


OFFLOAD: Rows = [
    ("nothing", lambda: offloaded(FSDP), [0, 0.5]),
    # Gradients of one micro batch to the host in fp32; weights back.
    ("the optimizer", lambda: offloaded(Z[2], False), [stepped(TOTAL, 44) + (4 + 2) * SHARD / PCIE, 0]),
    # To the host and back for the norm, and once more in fp32.
    ("the optimizer of stage 3 in fp32", lambda: offloaded(Z[3], False, **FP32),
     [stepped(TOTAL, 50) + (4 + 4 + 4 + 4) * SHARD / PCIE, 0]),
    ("in fp16", lambda: offloaded(Z[3], False, precision="fp16"),
     [stepped(TOTAL, 62) + (2 + 2 + 4 + 2) * SHARD / PCIE, 0]),
    ("stage 2 in fp16", lambda: offloaded(Z[2], False, precision="fp16"), [stepped(TOTAL, 44) + 6 * SHARD / PCIE, 0]),
    ("in bf16", lambda: offloaded(Z[2].but(optimizer_state_dtype="bf16"), False),
     [stepped(TOTAL, 44) + (2 + 2) * SHARD / PCIE, 0]),
    # Two sums wait on the host; all copies run beside backward, two thirds of the compute.
    ("beside backward", lambda: offloaded(Z[2].but(gradient_accumulation_steps=3)),
     [stepped(TOTAL, 44) + seen((2 * 4 + 4) * SHARD / PCIE, 2 / 3 * 12e-3) + 2 * SHARD / PCIE, 0]),
    ("beside backward of stage 3", lambda: offloaded(Z[3].but(gradient_accumulation_steps=3)),
     [stepped(TOTAL, 50) + seen((2 * 6 + 4) * SHARD / PCIE, 2 / 3 * 12e-3) + 2 * SHARD / PCIE, 0]),
    ("on two nodes", lambda: offloaded(Z[2].but(dp=16), False, cluster("16xH100")),
     [stepped(TOTAL / 2, 44) + 6 * TOTAL / 16 / PCIE, 0]),
    ("weights too", lambda: offloaded(Z[3].but(offload_param="cpu"), False),
     [stepped(TOTAL, 50) + (4 + 4 + 4) * SHARD / PCIE, 0]),
    ("weights too, of ranks that split sequences", lambda: offloaded(Z[3].but(offload_param="cpu", dp=4, cp=2), False),
     [stepped(TOTAL, 50) + (4 + 4 + 4) * SHARD / PCIE, 0]),
    ("weights alone", lambda: offloaded(Z[3].but(offload_optimizer="none", offload_param="cpu",
        gradient_accumulation_steps=2)),
     [2 * seen(4 * SHARD / PCIE, 4e-3), 0.5]),
    # Masters and moments in and out, gradients too; weights of both passes, and back once.
    ("disks", lambda: offloaded(Z[3].but(offload_optimizer="nvme", offload_param="nvme"), False, DISKS),
     [stepped(TOTAL, 50) + 8 * SHARD / PCIE + 32 * TOTAL / 7e9 + 4 * TOTAL / 7e9 + 2 * TOTAL / 7e9, 0]),
    ("disks of two unknown nodes", lambda: offloaded(Z[3].but(dp=16, offload_optimizer="nvme"), False,
        cluster("16xH100")),
     [stepped(TOTAL / 2, 50) + 10 * TOTAL / 16 / PCIE + 32 * TOTAL / 8e9, 0]),
    ("fast disks", lambda: offloaded(Z[3].but(offload_optimizer="none", offload_param="nvme"), False, replace(
        DISKS, nvme_gbytes_per_s=1e4)), [4 * SHARD / PCIE + 2 * TOTAL / 1e13, 0.5]),
    ("Megatron's", lambda: offloaded(megatron(dp=8, offload_optimizer="cpu", optimizer_offload_fraction=0.25), False),
     [stepped(TOTAL / 4, 44) + 6 * SHARD / 4 / PCIE, 0.375]),
    # FSDP2: weights in fp32 to the GPU twice a micro batch; gradients in fp32 to the host, where the sums are added.
    ("FSDP2 on the host", lambda: offloaded(FSDP.but(offload_param="cpu", offload_optimizer="cpu"), False),
     [stepped(TOTAL, 40) + (4 + 2 * 4) * SHARD / PCIE, 0]),
    ("FSDP2 on the host, three micro batches", lambda: offloaded(FSDP.but(offload_param="cpu", offload_optimizer="cpu",
        gradient_accumulation_steps=3)),
     [stepped(TOTAL, 64) + seen(4 * SHARD / PCIE, 2 / 3 * 4e-3) + 2 * 4 * SHARD / PCIE
      + 3 * seen(8 * SHARD / PCIE, 4e-3), 0]),
    ("FSDP2 on the host in bf16", lambda: offloaded(FSDP.but(offload_param="cpu", offload_optimizer="cpu",
        optimizer_state_dtype="bf16"), False), [stepped(TOTAL, 40) + (4 + 2 * 2) * SHARD / PCIE, 0]),
    # A copy of each input beside forward, and beside recompute and backward; the last has nothing beside it.
    ("layer inputs", lambda: seconds(FSDP.but(activation_offloading=True, recompute="full",
        gradient_accumulation_steps=2), "offload"),
     [2 * (COPY + 6 * (max(0, COPY - (H := layer(FSDP.but(recompute="full"))).forward)
                       + max(0, COPY - H.recompute - H.backward)))]),
    ("adapters", lambda: offloaded(Z[3].but(offload_param="cpu"), False, lora=LORA),
     [stepped(ADAPTERS := 6 * 7 * 2480, 50) + 8 * ADAPTERS / 8 / PCIE + 4 * SHARD / PCIE, 0]),
]  # fmt: skip


def muon(layout: Layout, **job: Any) -> float:
    """Seconds of Muon beyond those of AdamW with its moments."""
    made = work(layout, optimizer=OptimizerSpec(name="muon"), **job)
    whole = seconds(layout, "optimizer", optimizer=OptimizerSpec(name="muon"), **job)[0]
    moved = elementwise.optimizer_bytes_per_parameter(made)
    return whole - moved * max(made.stepped_parameters(each) for each in made.parameters) / 1e12


MATRICES = ((6, 320, 480), (12, 320, 120), (6, 480, 320), (12, 320, 896), (6, 896, 320))


def orthogonal(*rings: Callable[[float], float]) -> float:
    """Five steps of Newton-Schulz on every matrix, and gathers of ``size`` elements before."""
    products = sum(
        5 * number * (2 * matmul_s(GPU.others, s, s, l_) if s == l_ else matmul_s(GPU.others, s, s, l_)
                      + matmul_s(GPU.others, s, s, s) + matmul_s(GPU.others, s, l_, s))
        for number, *sides in MATRICES for s, l_ in [sorted(sides)]
    )  # fmt: skip
    return products + sum(number * each(a * b) for each in rings for number, a, b in MATRICES)


MUON: Rows = [
    ("whole matrices", lambda: muon(torch()), orthogonal()),
    ("sharded", lambda: muon(FSDP), orthogonal(lambda size: ring(8, 2 * size))),
    ("sharded in fp32", lambda: muon(FSDP, **FP32), orthogonal(lambda size: ring(8, 4 * size))),
    # A rank's half over four ranks, then the halves of both.
    ("sharded and split", lambda: muon(torch(zero_stage=3, dp=4, tp=2)),
     orthogonal(lambda size: ring(4, size), lambda size: ring(2, 2 * size))),
    ("split by Megatron", lambda: muon(megatron(tp=2, dp=4, zero_stage=0)), orthogonal(lambda size: ring(2, 4 * size))),
    ("stages", lambda: muon(megatron(pp=2, dp=4, zero_stage=0)), orthogonal() / 2),
    ("uneven stages", lambda: muon(megatron(pp=2, first_stage_layers=2, last_stage_layers=4, zero_stage=0)),
        orthogonal() * 4 / 6),
]  # fmt: skip

GB = 1e9


def chunks(layers: int, **layout: Any) -> list[int]:
    """Layers of each chunk."""
    return [len(chunk) for chunk in chunk_layers(layers, megatron(**layout))]


BIASED = 4 * 384 * 384 + 2 * 384 * 1600
"""Matrices of a layer of GPT; 3·384 + 1,600 biases are split, and 2·768 of norms and 2·384 of biases are not."""
SPLIT, WHOLE = 3 * 384 + 1600, 2 * 768 + 2 * 384
EXPERT = 3 * 320 * 200
COUNTS: Rows = [
    ("chunks", lambda: [chunks(12, pp=3, vp=2), chunks(14, pp=4, vp=2, first_stage_layers=3, last_stage_layers=3),
                        chunks(10, pp=3, last_stage_layers=2), chunks(10, pp=3, first_stage_layers=2),
                        chunks(7, pp=2, first_stage_layers=3, last_stage_layers=4)],
     [[2] * 6, [1, 2, 2, 2, 2, 2, 2, 1], [4, 4, 2], [2, 4, 4], [3, 4]]),
    ("layers of a stage", lambda: [stage_layers(DENSE, megatron(pp=3, vp=2), each) for each in range(3)], [(0, 3), (1,
        4), (2, 5)]),
    ("the middle", lambda: [middle_stage_layers(DENSE, megatron(pp=4, **ends)) for ends in (
        {}, {"first_stage_layers": 1}, {"first_stage_layers": 1, "last_stage_layers": 2})], [(6, 4), (5, 3), (3, 2)]),
    ("share of a step in which a stage waits", lambda: [bubble_fraction(megatron(
        pp=pp, vp=vp, gradient_accumulation_steps=steps)) for pp, vp, steps in (
        (1, 1, 8), (4, 1, 8), (4, 2, 8), (8, 1, 1))], [0, 3 / 11, 3 / 19, 7 / 8]),
    # 1F1B: the distance from the end; interleaved: 2(p−i−1) + (v−1)p warm-ups and one more, in groups of p.
    ("in flight", lambda: [in_flight(*each) for each in ((4, 1, 8, 0), (4, 1, 8, 3), (4, 1, 2, 0), (2, 2, 4, 0), (2, 2,
        4, 1),
                                                         (2, 2, 2, 0), (4, 2, 5, 3), (4, 2, 5, 0), (2, 2, 1, 0))],
     [(4,), (1,), (2,), (3, 2), (2, 1), (2, 2), (5, 1), (5, 5), (1, 1)]),
    ("a rank's parameters", lambda: [rank_parameters(DENSE, 2, 2, each) for each in (0, 1)],
     [3 * (LAYER / 2 + 640) + 2502 * 320, 3 * (LAYER / 2 + 640) + 320 + 2502 * 320]),
    ("a middle stage", lambda: rank_parameters(DENSE, 1, 3, 1), 2 * (LAYER + 640)),
    # Megatron has the tied embedding on the last stage too; positions on the first.
    ("tied embeddings", lambda: [rank_parameters(GPT, 2, pp, stage) for pp, stage in ((5, 0), (5, 4), (1, 0))],
     [(BIASED + SPLIT) // 2 + WHOLE + (2502 + 1024) * 384, (BIASED + SPLIT) // 2 + WHOLE + 768 + 2502 * 384,
      5 * ((BIASED + SPLIT) // 2 + WHOLE) + 768 + (2502 + 1024) * 384]),
    ("parts of a rank", lambda: [vars(each) for each in work(megatron(tp=2, pp=5), GPT).parameters[::4]],
     [{"dense_matrices": (BIASED + SPLIT) // 2 - SPLIT / 2, "vectors": WHOLE + SPLIT / 2,
         "vocabulary": (2502 + 1024) * 384.0,
       "experts": 0}, {"dense_matrices": (BIASED + SPLIT) // 2 - SPLIT / 2, "vectors": WHOLE + SPLIT / 2 + 768,
                       "vocabulary": 2502 * 384.0, "experts": 0}]),
    ("heads of multi-token prediction", lambda: [rank_parameters(replace(LATENT, mtp_num_layers=2,
        first_dense_layers=0), 2, pp, pp - 1)
     - rank_parameters(replace(LATENT, first_dense_layers=0), 2, pp, pp - 1) for pp in (1, 2)],
     [2 * (MTP := (352 * 480 + 96 * 880 + 160 * 640 + 3 * 352 * 200) // 2 + 352 * (120 + 160) + 12 * 352 + 2 * 352 + 256
           + 352 * 352 + 3 * 352), 2 * MTP + 2502 * 352]),
    ("their vectors", lambda: work(ONE, replace(LATENT, mtp_num_layers=2)).parameters[0].vectors - work(ONE,
        LATENT).parameters[0].vectors,
     2 * (2 * 352 + 256 + 3 * 352)),
    ("experts", lambda: [rank_experts(EXPERTS, pp, ep, etp, stage, layers) for pp, ep, etp, stage, layers in (
        (1, 2, 2, 0, None), (7, 4, 1, -1, None), (7, 1, 1, 0, None), (2, 1, 1, 0, (0, 1, 2)), (2, 3, 1, 1, (3, 4, 5,
        6)))],
     [5 * 12 * EXPERT / 4, 3 * EXPERT, 0, 12 * EXPERT, 16 * EXPERT]),
    ("experts of prediction heads", lambda: [rank_experts(replace(EXPERTS, mtp_num_layers=1), 7, 4, 1,
        each) for each in (3, 6)],
     [3 * EXPERT, 6 * EXPERT]),
    ("one expert", lambda: count(replace(EXPERTS, num_experts=1, experts_per_token=1)).layer.active_experts, EXPERT),
    ("a mean layer", lambda: (count(MIXED).layer.matrices, count(MIXED).embedding, count(MIXED).head,
        count(MIXED).final_norm,
                              count(MIXED).total, count(replace(MIXED, tied_embeddings=True)).embedding),
     (800_000, 3_200_000 - TABLE, TABLE, 1_000_000, 9_000_000, 3_200_000)),
    ("experts of a mean layer", lambda: [getattr(count(replace(MIXED, num_experts=8, experts_per_token=2,
        approximate=replace(
        MIXED.approximate, experts=4_800_000))).layer, name) for name in ("experts", "active_experts")], [800_000,
        200_000]),
    # The torch engine splits layers alone.
    ("tensor parallelism of torch", lambda: [work(torch(tp=2, zero_stage=3)).parameters[0].vocabulary,
        work(FSDP).parameters[0].total],
     [2 * TABLE, TOTAL]),
    ("matrices of a layer", lambda: [dense_layer_matrices(each, megatron(tp=tp)) for each, tp in ((DENSE, 2), (DENSE,
        6), (LATENT, 20))],
     [LAYER / 2, LAYER / 6 + 2 * 320 * 40 * 0.5, (352 * 480 + 96 * 880 + 160 * 640 + 3 * 352 * 1152) / 20 + 352 * 280]),
    # A bound of Megatron's fullest rank: weights and gradients of the mean stage, state over all GPUs, an export.
    ("least memory of Megatron", lambda: [least_megatron_gib(model, job(**more), 8, tp, pp, ranks, kept) * 2**30
                                          for model, more, tp, pp, ranks, kept in (
        (DENSE, {}, 2, 2, 1, 1.0), (DENSE, FP32, 1, 1, 1, 0.5), (EXPERTS, {}, 1, 1, 4, 0.0), (DENSE, {"lora": LORA}, 1,
        1, 1, 1.0))],
     [6 * TOTAL / 4 + 12 * TOTAL / 8 + 8 * TABLE, 8 * TOTAL + 0.5 * 8 * TOTAL / 8 + 4 * TABLE,
      6 * (count(EXPERTS).total - 60 * EXPERT + 15 * EXPERT) + 4 * TABLE, 0]),
    # r·(inputs + outputs); tensor parallelism splits outputs of the first, inputs of the last, and the rest not.
    ("adapters", lambda: [adapter_parameters_of(DENSE, LORA, each) for each in (1, 2)],
     [6 * 7 * (800 + 2 * 440 + 800), 6 * 7 * (320 + 240 + 2 * (320 + 60) + 240 + 320)]),
    ("adapters of all", lambda: adapter_parameters_of(DENSE, replace(LORA, targets="all-linear")),
     6 * 7 * (800 + 2 * 440 + 800 + 3 * 1216)),
    ("DoRA", lambda: adapter_parameters_of(DENSE, replace(LORA, use_dora=True), 2) - adapter_parameters_of(DENSE, LORA,
        2),
     6 * (480 + 240 + 320)),
    ("DoRA's weights, outputs and temporaries", lambda: [dora_sizes(DENSE, replace(LORA,
        use_dora=each)) for each in (True, False)],
     [[384000, 1040, max(320 * (640 + 18 * 480), 480 * (960 + 18 * 320))], [0, 0, 0]]),
    ("adapted layers", lambda: [[tuple(each) for each in adapted_layers(model, lora)] for model, lora in (
        (DENSE, replace(LORA, target_modules=("o_proj", "k_proj", "down_proj"))), (GPT, LORA), (LATENT, LORA), (replace(
            LATENT, latent=replace(LATENT.latent, q_lora_rank=None)), LORA))] + [
        [tuple(each) for each in linear_layers(EXPERTS)], len(adapted_layers(EXPERTS, replace(LORA,
            targets="all-linear")))],
     [[(6, "k_proj", 320, 120, "column"), (6, "o_proj", 480, 320, "row"), (6, "down_proj", 896, 320, "row")],
      [(5, "", 384, 1152, "column"), (5, "", 384, 384, "row"), (5, "", 1600, 384, "row")],
      [(4, "", 352, 120, "none"), (4, "", 96, 880, "column"), (4, "", 480, 352, "row"), (4, "", 352, 160, "none"),
       (4, "", 160, 640, "column")],
      [(4, "", 352, 120, "none"), (4, "", 96, 880, "column"), (4, "", 480, 352, "row"), (4, "", 352, 640, "column")],
      [(7, "", 320, 448, "column"), (7, "", 320, 224, "column"), (7, "", 320, 224, "column"), (7, "", 448, 320, "row"),
       (2, "", 320, 1152, "column"), (2, "", 320, 1152, "column"), (2, "", 1152, 320, "row"),
       (5, "", 320, 400, "column"), (5, "", 320, 400, "column"), (5, "", 400, 320, "row")], 4]),
    ("a rank of one layer", lambda: adapter_parameters_of(DENSE, LoraSpec(rank=7, rank_pattern={"k_proj": 3}))
     - adapter_parameters_of(DENSE, LoraSpec(rank=7)), 6 * (3 - 7) * 440),
    ("gate of shared experts", lambda: adapted_layers(replace(EXPERTS, family="qwen2_moe", head_dim=40,
        first_dense_layers=0),
                                                      replace(LORA, targets="all-linear"))[-1], (7, "", 320, 1,
                                                      "none")),
    ("layers that may be listed", lambda: [sorted(named_layers(each)) for each in (DENSE, EXPERTS, GPT, LATENT, STACKS,
        MIXED)],
     [["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"], ["k_proj", "o_proj", "q_proj",
         "v_proj"],
      [], [], [], []]),
    ("tokens", lambda: [(w.sequences, w.tokens, w.shard_tokens) for w in (
        work(megatron(cp=2, tp=4, sp=True)), work(megatron(tp=4)), work(FSDP, objective="dpo"))],
     [(3, 1536, 384), (3, T, T), (6, 2 * T, 2 * T)]),
    ("tokens of a chunk", lambda: [work(each, **more).chunk_tokens for each, more in (
        (FSDP, {}), (FSDP.but(chunked_loss=True), {}), (FSDP.but(chunked_loss=True), {"seq_length": 16}), (FSDP,
        {"objective": "dpo"}))], [T, 2048, 48, 2048]),
    ("rows of generation", lambda: [(w.completions, w.cached_bytes_per_token, w.vllm_share,
        w.holds_reference) for w in (
        work(FSDP.but(gradient_accumulation_steps=2), objective="grpo", grpo=GrpoSpec(vllm_gpu_memory_utilization=0.3)),
        work(FSDP, objective="grpo", grpo=GrpoSpec(beta=0.1)), work(FSDP, objective="dpo", lora=LORA), work(FSDP))],
     [(6, 4 * 120 * 6, 0.3, False), (3, 2880, 0, True), (3, 2880, 0, False), (3, 2880, 0, False)]),
    ("memory of generation", lambda: [generation_bytes(work(each, objective="grpo")) for each in (
        FSDP, deepspeed(zero_stage=3, dp=8), deepspeed(zero_stage=2, dp=8))],
     [3 * (2880 * 1024 + 4 * 5003) + rest for rest in (0, 2 * TOTAL, 0)]),
    ("memory of no generation", lambda: [generation_bytes(work(FSDP, **more)) for more in (
        {}, {"objective": "dpo"}, {"objective": "grpo", "grpo": GrpoSpec(vllm_gpu_memory_utilization=0.3)})], [0, 0,
        0]),
    ("routed tokens", lambda: [work(megatron(ep=each), EXPERTS, expert_load=1.5).routed_per_token for each in (1, 2)],
        [3, 4.5]),
    ("stepped", lambda: [(w := work(each, model, lora=lora)).stepped_parameters(w.parameters[0]) for each, model,
        lora in (
        (megatron(dp=4, cp=2), DENSE, None), (torch(dp=8), DENSE, None), (FSDP, DENSE, LORA), (megatron(dp=8, ep=4),
        EXPERTS, None))],
     [TOTAL / 8, TOTAL, 6 * 7 * 2480 / 8, (count(EXPERTS).total - 60 * EXPERT) / 8 + 15 * EXPERT / 2]),
    ("adapters of a mean stage", lambda: [work(megatron(pp=2), lora=each).adapters for each in (LORA, None)],
        [3 * 7 * 2480, None]),
    ("stages of layers", lambda: [getattr(work(megatron(pp=7), EXPERTS).stages, name) for name in ("stage_kinds",
        "distinct", "equal")],
     [[(1, 0)] * 2 + [(0, 1)] * 5, [0, 2, 6], [(0, 1), (1, 1), (2, 4), (6, 1)]]),
    ("chunks of kinds", lambda: work(megatron(pp=2, vp=2, first_stage_layers=3, last_stage_layers=4),
        EXPERTS).stages.chunk_kinds,
     [(1, 0), (1, 1), (0, 2), (0, 2)]),
    ("layers of a stage", lambda: [work(megatron(pp=7), EXPERTS).stage_layers(3), work(megatron(pp=2, vp=2,
        first_stage_layers=3, last_stage_layers=4), EXPERTS).stage_layers(1)], [(3,), (1, 2, 5, 6)]),
    ("one stage", lambda: work(megatron()).stages.equal, [(0, 1)]),
    ("precision", lambda: [(w.element, w.weight_bytes, w.autocast) for w in (
        work(FSDP), work(torch(dp=8)), work(torch(), **FP32), work(megatron()), work(megatron(), **FP32),
        work(deepspeed(zero_stage=2, autocast=True)))],
     [(2, 4, False), (2, 4, True), (4, 4, False), (2, 2, False), (4, 4, False), (2, 2, True)]),
    ("kernels of attention", lambda: [w.attention for w in (
        work(megatron(), GEMMA), work(megatron()), work(megatron(**TE)), work(megatron(**TE),
        machines=cluster("8xA100-80")),
        work(FSDP.but(attention_kernel="flash3")), work(FSDP, GEMMA))], ["unfused", "flash", "cudnn", "flash", "flash3",
        "flash"]),
    ("how it runs", lambda: [(e.engine, e.code, e.linear_layers_only, e.overlaps_gradients, e.overlaps_tensor_gradients,
        e.gradient_bytes) for e in (work(each, **more).execution for each, more in (
        (FSDP, {}), (torch(dp=8, compile_layers=True), {"precision": "fp8"}), (megatron(**TE, pp=2),
        {"precision": "fp8"}),
        (megatron(vp=2, pp=2), {}), (deepspeed(zero_stage=2), {}),
        (deepspeed(zero_stage=2), FP32)))],
     [("fsdp", "huggingface", False, True, False, 4), ("ddp", "compiled", True, True, False, 4),
      ("megatron", "fused", False, False, True, 4), ("megatron", "local", False, True, True, 4),
      ("deepspeed", "huggingface", False, True, True, 2), ("deepspeed", "huggingface", False, True, True, 4)]),
    ("what is compiled and kept", lambda: [(w.compiled_loss, w.gradient_accumulation_fusion, w.keeps_outputs) for w in (
        work(FSDP.but(compile_layers=True)), work(FSDP.but(compile_layers=True, chunked_loss=True)), work(megatron(**TE,
        pp=2)),
        work(megatron(pp=2, vp=3)))], [(False, False, False), (True, False, False), (False, True, False), (False, False,
        True)]),
]  # fmt: skip

AT_ONCE = operation(work(megatron(dp=8)), 2.0)
WRITE, READ, BETWEEN = 12 * TOTAL / 0.71e9, 12 * TOTAL / 2.6e9, 50_700 * 3600 / 8
EVERY = sqrt(2 * WRITE * BETWEEN)
SMALL = replace(NODE, gpu=replace(NODE.gpu, memory_gib=1.0), host_ram_gib=100.0, nvme_gib=10.0)


def verdict(layout: Layout, times: float = 1.1, **nodes: Any) -> list[Any]:
    """Of a GPU with so many times the memory that 24 sequences need."""
    w = work(layout.but(micro_batch_size=24))
    memory = peak_gib(w) * times / (1 - overheads().margin)
    report = peak(replace(w, cluster=replace(NODE, gpu=replace(NODE.gpu, memory_gib=memory), **nodes)))
    return [report.verdict, report.binding]


PLAN = predict(
    work(megatron(dp=8), machines=replace(NODE, price_per_node_hour_usd=7.0, num_nodes=1), total_tokens=10**11)
)
STOPS = Operation(
    checkpoint_gb=1,
    checkpoint_s=1,
    checkpoint_interval_s=1,
    hours_between_failures=1,
    goodput=0.25,
    data_mbytes_per_s=1,
    checkpoint_usd_per_month=1,
)
RUNS: Rows = [
    # fp32 masters and moments on every engine and layout, whatever the state is in; codes and scales beside them.
    ("a checkpoint's bytes", lambda: [checkpoint_bytes(each) / each.trained_parameters for each in (
        work(layout, **more) for layout, more in (
        (megatron(), {}), (megatron(), FP32), (FSDP, {}), (deepspeed(zero_stage=2), {}), (deepspeed(zero_stage=3), {}),
        (deepspeed(zero_stage=2, optimizer_state_dtype="bf16"), {}), (FSDP, {"optimizer": OptimizerSpec(name="sgd")}),
        (FSDP, {"optimizer": OptimizerSpec(name="lion")}), (FSDP, {"optimizer": OptimizerSpec(name="adafactor")}),
        (FSDP, {"optimizer": OptimizerSpec(name="adamw-8bit")})))],
     [12, 12, 12, 12, 12, 12, 8, 8, 8, 12 + 2 + 8 / 256]),
    ("bytes of adapters", lambda: checkpoint_bytes(work(FSDP, lora=LORA)), 12 * 6 * 7 * 2480),
    # C/T + (T/2 + restart)/M is least at T = √(2·C·M).
    ("failures", lambda: list(vars(AT_ONCE).values()), [
        12 * TOTAL / GB, WRITE, EVERY, 50_700 / 8, 1 - WRITE / EVERY - (EVERY / 2 + 600 + READ) / BETWEEN,
        128 * 1024 * 4 / 2 / 1e6,
        12 * TOTAL / GB * 0.023]),
    ("failures of long steps", lambda: operation(work(megatron(dp=8)), 1e6).checkpoint_interval_s, 1e6),
    ("failures of many", lambda: [operation(replace(work(megatron(dp=8)), cluster=replace(NODES, num_nodes=60_000)),
        2.0).goodput,
                                  operation(work(megatron(dp=8), machines=NODES), 2.0).checkpoint_s], [0, WRITE / 8]),
    ("a pair has two rows to read", lambda: operation(work(FSDP, objective="dpo"), 2.0).data_mbytes_per_s,
        2 * 128 * 1024 * 4 / 2 / 1e6),
    ("a prediction", lambda: [PLAN.step_time_s, PLAN.tokens_per_s * PLAN.step_time_s, PLAN.days, PLAN.cost_usd,
        PLAN.mfu, PLAN.num_steps],
     [sum(PLAN.step_time_components_s.values()), 128 * 1024, 1e11 / PLAN.tokens_per_s / 86400,
         7 * 24 * 1e11 / PLAN.tokens_per_s / 86400,
      PLAN.tokens_per_s * model_flops_per_token(DENSE, 1024) / (8 * NODE.gpu.bf16_tflops * 1e12), 1e11 / (128 * 1024)]),
    ("a frozen model's utilisation", lambda: (p := predict(work(FSDP,
        lora=LORA))).mfu / p.tokens_per_s * 8 * NODE.gpu.bf16_tflops * 1e12,
     model_flops_per_token(DENSE, 1024, frozen=True)),
    ("no length", lambda: [getattr(predict(work(FSDP, objective="sft")), name) for name in ("days", "num_steps",
        "total_days", "cost_usd")], [None] * 4),
    ("money", lambda: [cost_usd(replace(NODES, price_per_node_hour_usd=each), days) for each, days in ((3.0, 2.0), (3.0,
        None), (None, 2.0))],
     [3 * 8 * 2 * 24, None, None]),
    ("stops", lambda: [(p.total_days, p.total_cost_usd) for p in (replace(PLAN, days=3.0,
        cost_usd=None if each is STOPS else 8.0, operation=each)
                       for each in (STOPS, replace(STOPS, goodput=0.0)))],
     [(12, None), (float("inf"), float("inf"))]),
    ("the fullest stage", lambda: replace(PLAN, memory=tuple(StageMemory(stage=stage, components_gib={"weights": each,
        "logits": 1.0})
                                                             for stage, each in enumerate((2.0, 5.0, 3.0)))).peak_gib,
                                                             6),
    ("usable", lambda: usable_gib(SMALL.gpu), 0.95),
    # Tight from 0.95 of the usable memory; the fullest component binds, or the node.
    ("fits", lambda: [verdict(FSDP, each) for each in (0.99, 1.04, 1.06)],
     [["does not fit", "activations"], ["tight", "activations"], ["fits", "activations"]]),
    ("short of host memory", lambda: [verdict(deepspeed(zero_stage=3, dp=8, offload_optimizer="cpu"), host_ram_gib=each)
                                      for each in (1e3, None, 0.1)], [["fits", "activations"], *[["does not fit",
                                      "host memory"]] * 2]),
    ("short of host memory to load", lambda: [verdict(FSDP, host_ram_gib=each)[0] for each in (4.0, 5.0)],
        ["does not fit", "fits"]),
    ("short of disks", lambda: [verdict(deepspeed(zero_stage=3, dp=8, offload_optimizer="nvme"), nvme_gib=each,
        host_ram_gib=1e3)
                                for each in (1.0, 0.1, None)], [["fits", "activations"], *[["does not fit",
                                "NVMe"]] * 2]),
]  # fmt: skip


test_value = by_hand(STEPS, OFFLOAD, MUON, COUNTS, RUNS)


HF, MEGATRON = "huggingface with deepspeed", "transformer_engine"
BANDS = [
    f"{HF}, dense", f"{HF}, dense, offload", f"{MEGATRON}, dense", f"{MEGATRON}, experts", f"{MEGATRON}, dense, LoRA",
    f"{MEGATRON}, experts, Blackwell", f"{MEGATRON}, experts, up to Hopper", "other programs with fsdp, dense",
    "other programs with fsdp, experts, fp8", "other programs with fsdp, dense, LoRA",
        f"{MEGATRON}, dense, up to Hopper",
]  # fmt: skip
B200, A100 = cluster("8xB200"), cluster("8xA100-80")
OWN, SIMILAR, FSDPS, TES = "the same code", "similar code", "of other FSDP programs", "with Transformer Engine"


@pytest.mark.parametrize(
    ("layout", "more", "said", "band"),
    [
        (FSDP, {"machines": replace(NODE, gpu=replace(NODE.gpu, name="mine"))},
        "on mine to compare with; what its kernels", ""),
        (FSDP, {"machines": cluster("8xH20")}, "no published run on H20 to compare with", ""),
        (FSDP, {"objective": "dpo"}, "no published run of TRL's DPOTrainer", ""),
        (deepspeed(zero_stage=3, offload_param="nvme"), {}, "no published run offloads to disks", ""),
        (deepspeed(zero_stage=3, offload_param="cpu"), {}, OWN, BANDS[1]),
        (deepspeed(zero_stage=2, offload_optimizer="cpu"), {}, OWN, BANDS[1]),
        (deepspeed(zero_stage=2), {}, OWN, BANDS[0]),
        (deepspeed(zero_stage=2), {"model": EXPERTS}, "no published run of Hugging Face layers with engine=deepspeed",
        ""),
        (deepspeed(zero_stage=2), {"lora": LORA}, "no published run of this kind", ""),
        (FSDP, {}, FSDPS, BANDS[7]),
        (FSDP, {"precision": "fp8", "model": EXPERTS}, FSDPS, BANDS[8]),
        (FSDP, {"lora": LORA}, FSDPS, BANDS[9]),
        (megatron(**TE), {}, OWN, BANDS[10]),
        (megatron(**TE), {"machines": B200}, OWN, BANDS[2]),
        (megatron(**TE), {"machines": B200, "model": EXPERTS}, OWN, BANDS[5]),
        (megatron(**TE), {"model": EXPERTS}, OWN, BANDS[6]),
        (megatron(**TE), {"lora": LORA}, OWN, BANDS[4]),
        (megatron(), {"lora": LORA}, "no published run of this kind", ""),
        (megatron(), {}, TES, BANDS[10]),
        (megatron(), {"machines": A100}, SIMILAR, "elsewhere"),
        (megatron(), {"machines": A100, "model": EXPERTS}, TES, BANDS[6]),
        (replace(deepspeed(zero_stage=3, tp=2), implementation="local"), {"machines": A100}, TES, BANDS[10]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("few", [False, True])
def test_a_band_is_of_the_code_that_runs(
    layout: Layout, more: dict[str, Any], said: str, band: str, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each band has a number of rows of its own. Few rows give no band, and those of a generation then all of them."""
    table = {name: {"width": 0.01 * (1 + place), "rows": 100 + place, "few": few} for place, name in enumerate(BANDS)}
    elsewhere = {"torch's kernels with megatron, dense": {"width": 0.5, "rows": 200}}
    known = {"bands": table, "bands-elsewhere": elsewhere}
    monkeypatch.setattr(estimate, "rows", lambda name: known.get(name, {"H100": 1, "H20": 1}))
    found = estimate.step_time_evidence(work(layout, **more))
    if few and band.endswith(("Blackwell", "Hopper")):
        band = band.rpartition(", ")[0]
    row = elsewhere["torch's kernels with megatron, dense"] if band == "elsewhere" else table.get(band)
    own = row is not None and (band == "elsewhere" or (said == OWN and not few))
    assert found.band == (row["width"] if own and row else None)
    assert (f"{row['rows']}" if row else said) in found.words
    assert ("all within ±" if few and said == OWN else said) in found.words
    assert not row or own or f"± {row['width']:.0%}" in found.words
