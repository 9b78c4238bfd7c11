"""What does not divide, is narrower, or lies across nodes: counts by hand beside the cost model's."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from kit.cost.memory.activations_megatron import layer_terms
from kit.cost.workload import Workload
from kit.planner.rules import violations
from kit.specs.catalog import load_model
from tests.support.models import cluster, deepspeed, job, megatron


def test_what_a_refusal_offers_is_allowed() -> None:
    """Twelve heads over six of keys: four ranks would hold one and a half of them."""
    heads: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 128, "hidden_size": 1536}
    model = replace(load_model("llama-3.1-8b"), **heads)
    refused = Workload(
        model, cluster("8xH100"), job(seq_length=4096), deepspeed(cp=8, cp_comm_type="a2a", zero_stage=3)
    )
    (message,) = (each.message for each in violations(refused) if each.rule == "ulysses_divides_heads")
    offered = [int(size) for size in re.findall(r"\d+", message.partition("; use ")[2])]
    assert offered == [1, 2]
    for cp in offered:
        fine = replace(refused, layout=replace(refused.layout, cp=cp, dp=8 // cp))
        assert not [each for each in violations(fine) if each.rule.startswith("ulysses")]


def test_flags_that_no_engine_takes_together_are_to_be_left_out() -> None:
    """Virtual stages are Megatron's, compiled blocks are not: no engine is offered for both."""
    layout = deepspeed(dp=8, zero_stage=2, vp=2, zero_quantized_weights=True, compile_layers=True)
    both = Workload(load_model("llama-3.1-8b"), cluster("8xH100"), job(), replace(layout, engine="megatron"))
    (message,) = (each.message for each in violations(both) if each.rule == "flag_of_engine")
    assert "zero_quantized_weights" in message
    alone = replace(both, layout=replace(both.layout, engine="torch", implementation="huggingface"))
    (message,) = (each.message for each in violations(alone) if each.rule == "flag_of_engine")
    assert message.endswith("; leave them out")


def test_each_token_keeps_a_copy_and_a_result_for_each_of_its_experts() -> None:
    """Mixtral: 2 of 8 experts, each 14,336 wide, gated: a copy of the token, gate and up, and products of both."""
    model = load_model("mixtral-8x7b")
    workload = Workload(model, cluster("8xH100"), job(), megatron(dp=8, ep=8))
    experts = layer_terms(workload, True)["experts"]
    assert experts == 2 * 2 * (4096 + 6 * 14336) * 4096
    more = replace(workload, model=replace(model, experts_per_token=4))
    assert layer_terms(more, True)["experts"] == 2 * experts
