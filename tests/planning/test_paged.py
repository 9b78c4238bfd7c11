"""Paged moments in the plan: bounds of memory and time that differ from the unpaged plan by the bytes of moments."""

from __future__ import annotations

import dataclasses

import pytest

from kit.emit.other_trainers import axolotl, for_torchtitan
from kit.emit.readme import readme
from kit.emit.trainer import training_arguments
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.rehearsal.scaled_down import scaled_down
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec, OptimizerName, OptimizerSpec
from kit.specs.layout import Pins
from kit.specs.optimizers import OPTIMIZERS

BYTES: dict[OptimizerName, float] = {"adamw": 8.0, "adamw-8bit": 2.0}
"""Two moments in fp32, or two codes of a byte."""


def planned(gpus: str, zero: int, tp: int = 1, name: OptimizerName = "adamw", paged: bool = True) -> Plan:
    pins = Pins(engine="torch", zero_stage=zero, tp=tp, paged_optimizer=paged, recompute="full", micro_batch_size=1)
    job = JobSpec(optimizer=OptimizerSpec(name=name), seq_length=2048)
    return make_plan(load_model("llama-3.2-1b"), parse_cluster(gpus), job, pins)


def test_no_optimizer_pages_more_than_it_has() -> None:
    assert {name: each.paged for name, each in OPTIMIZERS.items() if each.paged} == BYTES
    assert all(each.paged <= each.moments.matrices for each in OPTIMIZERS.values())


def test_a_plan_without_it_keeps_its_digest() -> None:
    plan = planned("1xH100", 0, paged=False)
    assert "paged_optimizer" not in plan.to_yaml()
    assert plan.digest != planned("1xH100", 0).digest


def test_a_rehearsal_leaves_it_out() -> None:
    small = scaled_down(planned("8xH100", 3))
    assert small.pins.paged_optimizer is False
    assert any("paged_optimizer=True -> False" in each for each in small.replaced)


@pytest.mark.parametrize(
    ("name", "optim", "own"), [("adamw", "32", "PagedAdamW32bit"), ("adamw-8bit", "8", "PagedAdamW8bit")]
)
def test_other_programs_page_under_ddp_alone(name: OptimizerName, optim: str, own: str) -> None:
    """bitsandbytes' classes do not step FSDP2's weights."""
    plan = planned("1xH100", 0, name=name)
    assert training_arguments(plan)["optim"] == f"paged_adamw_{optim}bit"
    assert axolotl(plan)["optimizer"] == f"paged_adamw_{optim}bit"
    assert not for_torchtitan(plan)
    assert f"--optim paged_adamw_{optim}bit" in readme(plan)
    assert f"bitsandbytes.optim.{own}" in readme(plan)
    assert "do not step FSDP2's weights" in readme(planned("8xH100", 3, name=name))
    assert "paged" not in readme(planned("1xH100", 0, name=name, paged=False))


def test_the_trainer_knows_these_names() -> None:
    from transformers.training_args import OptimizerNames

    assert {"paged_adamw_32bit", "paged_adamw_8bit"} <= {each.value for each in OptimizerNames}


def test_the_host_must_have_the_memory() -> None:
    plan = planned("1xH100", 0)
    small = dataclasses.replace(plan.cluster, host_ram_gib=plan.predicted.host_ram_gib_per_node)
    with pytest.raises(Exception, match="; 9 GiB of host memory a node, 8 of 9 are usable"):
        make_plan(plan.model, small, plan.job, Pins(engine="torch", paged_optimizer=True))
