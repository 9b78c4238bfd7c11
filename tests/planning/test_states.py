"""Bytes per parameter against the ZeRO paper and Megatron's formulas."""

from __future__ import annotations

import pytest

from kit.cost.memory.states import state_bytes
from kit.specs.layout import Layout
from tests.support.models import deepspeed, megatron, torch


@pytest.mark.parametrize(
    ("layout", "precision", "expected"),
    [
        (torch(), "fp32", 16),
        (torch(), "bf16", 16),
        (torch(dp=8, zero_stage=3), "bf16", 2),
        (torch(dp=8, zero_stage=2), "bf16", 2),
        (megatron(zero_stage=0, dp=8), "bf16", 18),
        (megatron(dp=8), "bf16", 6 + 12 / 8),
        (megatron(dp=4, cp=2), "bf16", 6 + 12 / 8),
        (megatron(zero_stage=0, dp=8), "fp32", 16),
        (megatron(dp=8), "fp32", 8 + 8 / 8),
        (deepspeed(zero_stage=0, dp=8), "bf16", 16),
        (deepspeed(zero_stage=1, dp=8), "bf16", 4 + 12 / 8),
        (deepspeed(zero_stage=2, dp=8), "bf16", 2 + 14 / 8),
        (deepspeed(zero_stage=3, dp=8), "bf16", 16 / 8),
        (deepspeed(zero_stage=1, dp=8, gradient_accumulation_steps=4), "bf16", 2 + 6 + 12 / 8),
        (deepspeed(zero_stage=2, dp=8, gradient_accumulation_steps=4), "bf16", 2 + 16 / 8),
        (deepspeed(zero_stage=3, dp=8, gradient_accumulation_steps=4), "bf16", 18 / 8),
        (deepspeed(zero_stage=0, dp=8), "fp32", 16),
        (deepspeed(zero_stage=2, dp=8), "fp32", 4 + 16 / 8),
        (deepspeed(zero_stage=3, dp=8), "fp32", 20 / 8),
        (deepspeed(zero_stage=2, dp=8, offload_optimizer="cpu"), "bf16", 2),
        (deepspeed(zero_stage=3, dp=8, offload_optimizer="cpu", offload_param="cpu"), "bf16", 0),
    ],
)
def test_bytes_per_parameter(layout: Layout, precision: str, expected: float) -> None:
    found = state_bytes(layout, precision)  # type: ignore[arg-type]
    assert found.weights + found.gradients + found.optimizer == pytest.approx(expected)
