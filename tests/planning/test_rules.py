"""Every rule: a layout that breaks it and the same layout mended (``rule_cases``, a file for each engine)."""

from __future__ import annotations

import dataclasses
import re

import pytest

from kit.cost.workload import Workload
from kit.planner.rules import is_legal, rule_names, violations
from kit.specs.catalog import load_model
from tests.planning.rule_cases import LLAMA, Case, filled, of_deepspeed, of_megatron, of_torch, of_trl, settled
from tests.support.models import cluster, deepspeed, job, megatron

CASES = [*of_torch.CASES, *of_deepspeed.CASES, *of_megatron.CASES, *of_trl.CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.bad.engine}")
def test_a_broken_rule_is_named_and_alone(case: Case) -> None:
    found = violations(settled(case, good=False))
    assert [violation.rule for violation in found] == [case.rule]
    assert re.search(case.said, found[0].message), found[0].message
    assert "\n" not in found[0].message


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.bad.engine}")
def test_the_mended_layout_is_legal(case: Case) -> None:
    assert violations(settled(case, good=True)) == ()
    assert is_legal(settled(case, good=True))


def test_the_example_of_the_design() -> None:
    """tp=6 breaks four rules at once, and each says what it would take."""
    found = violations(settled(Case("", megatron(tp=6), "", megatron()), good=False))
    messages = [violation.message for violation in found]
    assert any("tp=6 does not divide num_attention_heads=32 of llama-3.1-8b; use 1, 2, 4 or 8" in m for m in messages)
    assert {violation.rule for violation in found} == {
        "world_size",
        "tp_divides_heads",
        "tp_fits_kv_heads",
        "tp_divides_mlp",
    }


def test_key_value_heads_may_be_fewer_than_ranks() -> None:
    """megatron-core shares them (attention.py); only a mixture of both is refused."""
    assert (
        violations(settled(Case("", megatron(tp=8), "", megatron(), model="llama-3-70b", gpus="16xH100"), good=False))
        == ()
    )
    shared = Case("", megatron(tp=4), "", megatron(), model="qwen2.5-3b")  # two key/value heads, sixteen query heads
    assert violations(settled(shared, good=False)) == ()


def test_kv_heads_and_mlp_that_tp_does_not_fit() -> None:
    odd = dataclasses.replace(load_model(LLAMA), num_attention_heads=24, num_key_value_heads=3, ffn_hidden_size=14338)
    found = violations(
        Workload(
            model=odd,
            cluster=cluster("8xH100"),
            job=job(),
            layout=megatron(tp=4, dp=2, gradient_accumulation_steps=64),
        )
    )
    assert [violation.rule for violation in found] == ["tp_fits_kv_heads", "tp_divides_mlp"]


def test_rope_kinds_that_megatron_does_not_compute() -> None:
    dynamic = dataclasses.replace(load_model(LLAMA), rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    broken = Workload(model=dynamic, cluster=cluster("8xH100"), job=job(), layout=filled(megatron(), 8, 128))
    assert [v.rule for v in violations(broken)] == ["megatron_rope"]
    assert violations(broken.with_layout(filled(deepspeed(zero_stage=3), 8, 128))) == ()


def test_rope_models_may_run_longer_than_they_were_made_for() -> None:
    found = violations(
        settled(
            Case("", deepspeed(zero_stage=3), "", deepspeed(), model="llama-2-7b", change={"seq_length": 8192}),
            good=False,
        )
    )
    assert found == ()


def test_every_rule_has_a_case() -> None:
    covered = {case.rule for case in CASES} | {"tp_fits_kv_heads", "tp_divides_mlp", "megatron_rope"}
    assert rule_names() == covered
