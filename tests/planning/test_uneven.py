"""What does not divide, is narrower, or lies across nodes: counts by hand beside the cost model's."""

from __future__ import annotations

import re
from dataclasses import replace

from kit.cost.memory.activations_megatron import layer_terms
from kit.cost.workload import Workload
from kit.planner.rules import violations
from kit.specs.catalog import load_model
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from tests.planning.shapes import by_hand
from tests.support.models import cluster, deepspeed, job, megatron, torch

LLAMA, MIXTRAL = load_model("llama-3.1-8b"), load_model("mixtral-8x7b")
HEADS = replace(LLAMA, num_attention_heads=12, num_key_value_heads=6, head_dim=128, hidden_size=1536)
"""Twelve heads over six of keys: four ranks would hold one and a half of them."""
FLAGS = {"vp": 2, "zero_quantized_weights": True, "compile_layers": True}


def workload(layout: Layout, model: ModelSpec = LLAMA, **job_of: int) -> Workload:
    return Workload(model, cluster("8xH100"), job(**job_of), layout)


def said(rule: str, broken: Workload) -> str:
    (message,) = (each.message for each in violations(broken) if each.rule == rule)
    return message


def ulysses(cp: int) -> Workload:
    return workload(deepspeed(cp=cp, dp=8 // cp, cp_comm_type="a2a", zero_stage=3), HEADS, seq_length=4096)


def experts(top: int) -> float:
    """Bytes that a layer's experts keep."""
    return layer_terms(workload(megatron(dp=8, ep=8), replace(MIXTRAL, experts_per_token=top)), True)["experts"]


test_value = by_hand([
    ("what a refusal offers", lambda: re.findall(
        r"\d+", said("ulysses_divides_heads", ulysses(8)).partition("; use ")[2]), ["1", "2"]),
    ("what is offered is allowed", lambda: [[each.rule for each in violations(ulysses(cp)) if "ulysses" in each.rule]
                                            for cp in (1, 2)], [[], []]),
    # Virtual stages are Megatron's, compiled blocks are not: no engine is offered for both.
    ("flags that no engine takes together", lambda: said("flag_of_engine", workload(
        torch(dp=8, zero_stage=2, **FLAGS))).partition("; ")[2], "leave them out"),
    ("a flag of another engine", lambda: "zero_quantized_weights" in said("flag_of_engine", workload(
        megatron(dp=8, zero_stage=2, **FLAGS))), True),
    # Mixtral: experts of 14,336, gated: a copy of the token, gate and up, and products of both.
    ("copies and results of experts", lambda: [experts(2), experts(4)],
     [2 * 2 * (4096 + 6 * 14336) * 4096, 4 * 2 * (4096 + 6 * 14336) * 4096]),
])  # fmt: skip
