"""Experts that ranks share out beside FSDP2: what one process computes, by family, stage and split."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kit.planner.plan import Plan
from kit.specs.job import BalancingSpec
from tests.megatron import shapes
from tests.support import tiny
from tests.support.workers import pool
from tests.training import cases
from tests.training.sft_rows import gradients_of_a_step, rows_alone

LOSSES = BalancingSpec(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.02, moe_z_loss_coeff=0.01)
LONG = {"recompute": "full", "chunked_loss": True}
CASES: dict[str, tuple[str, dict[str, Any], BalancingSpec | None]] = {
    "qwen3_moe": ("qwen3_moe", {}, None),
    "mixtral": ("mixtral", {}, LOSSES),
    "gpt_oss": ("gpt_oss", {"zero_stage": 2}, None),
    "deepseek_v3": ("deepseek_v3", {**LONG}, None),
    "qwen2_moe": ("qwen2_moe", {"zero_stage": 2, **LONG}, None),
    "glm4_moe": ("glm4_moe", {}, None),
    "minimax_m2": ("minimax_m2", {}, None),
    "of-one-copy": ("qwen3_moe", {"ep": 4}, None),
    "of-split-sequences": ("qwen3_moe", {"dp": 2, "cp": 2, "cp_comm_type": "p2p", "ep": 4}, None),
}
"""Four ranks; unless a case says otherwise two have each expert, and each has tokens of its own."""


def plans(case: str, **job: Any) -> tuple[Plan, Plan]:
    """Of one process, and of four."""
    family, layout, balancing = CASES[case]
    job |= {"optimizer": dataclasses.replace(tiny.plan().job.optimizer, eps=1e-3), "balancing": balancing}
    spec = tiny.model(family, **shapes.BY_FAMILY.get(family, {}))
    split = {"dp": 4, "ep": 2, "zero_stage": 3, **layout}
    one = tiny.plan(spec, job=job, micro_batch_size=2, gradient_accumulation_steps=2 * split["dp"])
    return one, tiny.plan(spec, job=job, micro_batch_size=2, gradient_accumulation_steps=2, **split)


@pytest.mark.everyday("qwen3_moe", "gpt_oss")
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_one_process(tmp_path: Path, case: str) -> None:
    """Gradients, curve and weights; the checkpoint goes on without expert parallelism."""
    cases.agree(tmp_path, *plans(case))


def test_ranks_hold_their_share_of_experts_and_of_the_rest(tmp_path: Path) -> None:
    """Of all 16 bytes a parameter, a quarter, whether or not experts are spread."""
    _, split = plans("qwen3_moe")
    found, expected = (
        pool("torch", 4).run(cases.first_step, tiny.run_directory(tmp_path / str(each.layout.ep), each))
        for each in (split, dataclasses.replace(split, layout=dataclasses.replace(split.layout, ep=1)))
    )
    assert [rank["held"] for rank in found] == [rank["held"] for rank in expected]


@pytest.mark.nightly
def test_bf16_is_close_to_fp32(tmp_path: Path) -> None:
    cases.near_in_bf16(tmp_path, *plans("qwen3_moe"), cosine=0.97)


def test_rows_of_other_lengths_on_each_rank(tmp_path: Path) -> None:
    """SFT: ranks send different numbers of tokens, to some expert perhaps none."""
    expected = rows_alone(tmp_path, tiny.model("qwen3_moe"), packing=False)
    split = {"dp": 2, "ep": 2, "zero_stage": 3}
    one, spread = (expected.run_directory(tmp_path / name, each) for name, each in (("one", {}), ("split", split)))
    whole, found = (pool("torch", size).run(gradients_of_a_step, each)[0] for size, each in ((1, one), (2, spread)))
    assert (found["loss"].tokens, found["loss"].mean) == (expected.tokens, pytest.approx(expected.mean, rel=1e-6))
    assert cases.worst(found["gradients"], whole["gradients"]) < 1e-5


@pytest.mark.parametrize(
    "fault",
    [
        "experts-averaged-over-copies",
        "experts-drop-a-weight",
        "experts-return-in-their-order",
        "experts-counted-before-they-are-spread",
    ],
)
@pytest.mark.nightly
def test_a_planted_fault_turns_the_comparison_red(tmp_path: Path, fault: str) -> None:
    assert cases.fault_shows(tmp_path, *plans("qwen3_moe"), fault)
