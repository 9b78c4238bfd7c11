"""Gradients that Megatron sums and reduces in bf16, beside those that it sums in fp32 of the same run in bf16."""

from __future__ import annotations

import pytest
import torch

from kit.cost.memory.states import state_bytes
from tests.megatron import cases, inside
from tests.support import tiny
from tests.support.workers import pool

ROUNDING = 2.0**-8
"""Largest relative error of a number that is rounded to bf16."""


def runs(tmp_path, look, *arguments, **layout):
    """The same on gradients in fp32 and in bf16; of the main rank."""
    given = {"job": {"precision": "bf16"}, "model_path": None, **layout}
    rundirs = [
        cases.run_directory(tmp_path / kept, tiny.model(num_layers=2), gradient_dtype=kept, **given)
        for kept in ("fp32", "bf16")
    ]
    return *(pool("megatron", 2).run(look, each, *arguments)[0] for each in rundirs), rundirs[1].plan


def test_one_micro_batch_is_rounded_once(tmp_path):
    """A sum of one, and its division by the number of tokens: every element is the rounded one of fp32."""
    whole = {"tp": 2, "micro_batch_size": cases.GLOBAL_BATCH_SIZE, "gradient_accumulation_steps": 1}
    exact, short, _ = runs(tmp_path, cases.train, 1, **whole)
    assert exact.losses == short.losses
    assert [
        name
        for name, gradient in exact.gradients.items()
        if not torch.equal(gradient.bfloat16().float(), short.gradients[name])
    ] == []
    assert short.norms[0] == pytest.approx(exact.norms[0], rel=ROUNDING)


def test_sums_of_micro_batches_and_ranks_are_near(tmp_path):
    """Two micro batches on each of two ranks: three sums and a division round; and as many steps."""
    exact, short, _ = runs(tmp_path, cases.train, 3, dp=2, zero_stage=1)
    differences = {
        name: float((short.gradients[name] - gradient).norm() / gradient.norm())
        for name, gradient in exact.gradients.items()
    }
    assert 0 < max(differences.values()) < 4 * ROUNDING, differences
    assert short.norms == pytest.approx(exact.norms, rel=4 * ROUNDING)
    for name, master in exact.masters.items():
        moved, apart = (master - exact.initial[name]).norm(), (master - short.masters[name]).norm()
        assert apart < 8 * ROUNDING * moved, name


@pytest.mark.parametrize("layout", [{"dp": 2, "zero_stage": 1}, {"tp": 2}], ids=["sharded", "whole"])
def test_ranks_hold_what_is_predicted(tmp_path, layout):
    exact, short, plan = runs(tmp_path, cases.inside, inside.memory_bytes, **layout)
    predicted = [
        state_bytes(plan.layout.but(gradient_dtype=each), "bf16").gradients_in_forward for each in ("fp32", "bf16")
    ]
    parameters = exact["weights"] / 2
    assert [exact["gradients"], short["gradients"]] == pytest.approx(
        [each * parameters for each in predicted], rel=0.02
    )
    assert short["optimizer"] == exact["optimizer"]
