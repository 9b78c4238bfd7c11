"""Muon's iteration in the predicted step: its GEMMs are those of the code, and no rank saves another one any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kit.cost.time.step import MUON_STEPS, muon_gemms
from kit.engines.torch.gathered_optimizers import orthogonalised
from kit.planner.make_plan import make_plan
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec, OptimizerName, OptimizerSpec
from kit.specs.layout import Pins


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (64, 160), (224, 32)])
def test_the_iteration_multiplies_what_is_counted(inputs: int, outputs: int) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalised(torch.ones(outputs, inputs, device="meta"))
    counted = sum(2 * rows * columns * inner for rows, columns, inner in muon_gemms(inputs, outputs))
    assert counter.get_total_flops() == MUON_STEPS * counted


def optimizer_s(name: OptimizerName, cluster: str = "8xH100", **pins: Any) -> float:
    job = JobSpec(optimizer=OptimizerSpec(name=name))
    plan = make_plan(load_model("llama-3.1-8b"), parse_cluster(cluster), job, Pins(**pins))
    return plan.predicted.step_time_components_s["optimizer"]


def test_every_rank_orthogonalises_every_matrix_of_its_stage() -> None:
    """8B on H100: 32 layers of 4096x4096 (2), 4096x1024 (2) and 4096x14336 (3), 0.67 PFLOP a step."""
    pins: dict[str, Any] = {"engine": "torch", "zero_stage": 3, "tp": 1, "cp": 1}
    node, four = (optimizer_s("muon", cluster, **pins) for cluster in ("8xH100", "4x8xH100"))
    layer = sum(
        number * 2 * rows * columns * inner
        for number, shape in ((2, (4096, 4096)), (2, (4096, 1024)), (3, (4096, 14336)))
        for rows, columns, inner in muon_gemms(*shape)
    )
    flops = 32 * MUON_STEPS * layer
    assert flops / 989.5e12 < node < 2 * flops / 989.5e12
    assert node < four < 1.5 * node  # gathers over nodes
    assert optimizer_s("adamw", **pins) < 0.1 * node


def test_stages_of_a_pipeline_share_the_matrices_and_tensor_parallel_ranks_do_not() -> None:
    pins: dict[str, Any] = {"engine": "megatron", "zero_stage": 0, "cp": 1, "vp": 1, "implementation": "local"}
    cluster = "8xB200"
    whole, tensors, stages = (optimizer_s("muon", cluster, tp=tp, pp=pp, **pins) for tp, pp in ((1, 1), (2, 1), (1, 2)))
    assert stages == pytest.approx(whole / 2, rel=0.1)
    assert 0.9 * whole < tensors
