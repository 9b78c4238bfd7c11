"""Bytes per parameter against the ZeRO paper and Megatron's formulas."""

from __future__ import annotations

import pytest

from kit.cost.hardware import cpu_adam_s, pcie_bytes_per_s
from kit.cost.memory.offload import host_ram_gib_per_node
from kit.cost.memory.peak import peak_gib
from kit.cost.memory.states import StateBytes, state_bytes
from kit.cost.time.step import step_time_components_s
from kit.cost.workload import Workload
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.layout import Layout
from tests.support.models import deepspeed, job, megatron, torch


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
    assert state_bytes(layout, precision).held == pytest.approx(expected)  # type: ignore[arg-type]


def test_gradients_are_there_in_forward_only_where_something_holds_them() -> None:
    def in_forward(layout: Layout) -> float:
        return state_bytes(layout, "bf16").gradients_in_forward

    assert in_forward(torch()) == 0
    assert in_forward(torch(gradient_accumulation_steps=2)) == 4
    assert in_forward(torch(dp=2)) == 4  # DDP's buckets
    assert in_forward(megatron()) == 4  # Megatron's buffer
    assert in_forward(deepspeed(zero_stage=2, dp=2)) == 0


def test_host_memory_of_offload() -> None:
    """12 bytes of optimizer, and 4 of fp32 gradients, 2 of summed ones, 2 of weights, pinned: half as much again."""
    model, cluster = load_model("llama-2-7b"), parse_cluster("2x8xA100-40")
    optimizer = deepspeed(zero_stage=3, dp=16, offload_optimizer="cpu")
    both = deepspeed(zero_stage=3, dp=16, offload_optimizer="cpu", offload_param="cpu")
    assert host_ram_gib_per_node(Workload(model, cluster, job(precision="bf16"), deepspeed(zero_stage=3, dp=16))) == 0
    assert host_ram_gib_per_node(Workload(model, cluster, job(precision="bf16"), optimizer)) == pytest.approx(
        6_738_415_616 * 21 / 2 / 2**30
    )
    assert host_ram_gib_per_node(Workload(model, cluster, job(precision="bf16"), both)) == pytest.approx(
        6_738_415_616 * 24 / 2 / 2**30
    )


def test_megatrons_optimizer_leaves_weights_and_gradients_on_the_device() -> None:
    """On the host 12 bytes of optimizer, and 4 of pinned gradients: half as much again."""
    model, cluster = load_model("llama-2-7b"), parse_cluster("2x8xA100-40")
    layout = megatron(dp=16, zero_stage=1, offload_optimizer="cpu")
    work = Workload(model, cluster, job(precision="bf16"), layout)
    assert host_ram_gib_per_node(work) == pytest.approx(6_738_415_616 * 18 / 2 / 2**30)
    assert host_ram_gib_per_node(work.with_layout(layout.but(offload_optimizer="none"))) == 0
    assert state_bytes(layout, "bf16").held == 6
    assert peak_gib(work.with_layout(layout.but(offload_optimizer="none"))) - peak_gib(work) == pytest.approx(
        6_738_415_616 * 12 / 16 / 2**30
    )
    seconds = step_time_components_s(work)
    copied = 6_738_415_616 / 16 * 6 / pcie_bytes_per_s(cluster.gpu)
    assert seconds["optimizer"] == 0
    assert seconds["offload"] == pytest.approx(cpu_adam_s(6_738_415_616 / 2, 1) + copied)


def test_held_is_the_textbook_sum() -> None:
    assert StateBytes(weights=1, gradients=2, gradients_in_forward=0, optimizer=4, extra_in_step=8).held == 7


@pytest.mark.parametrize(
    ("stage", "micro_batches", "copy"),
    [(1, 1, 4 / 8), (1, 4, 0), (2, 1, 4 / 8), (2, 4, 0), (3, 1, 4 / 8), (3, 4, 4 / 8)],
)
def test_the_step_takes_gradients_as_fp32_unless_they_were_summed_so(
    stage: int, micro_batches: int, copy: float
) -> None:
    """Stages 1 and 2 sum micro batches in fp32, which needs no copy; stage 3 keeps 16 bits and copies a sub group."""
    layout = deepspeed(zero_stage=stage, dp=8, gradient_accumulation_steps=micro_batches)
    assert state_bytes(layout, "bf16").extra_in_step == pytest.approx(copy)
