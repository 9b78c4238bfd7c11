"""Paged moments in the plan: bounds of memory and time that differ from the unpaged plan by the bytes of moments."""

from __future__ import annotations

import dataclasses

import pytest

from kit.cost.hardware import pcie_bytes_per_s
from kit.cost.memory import engine, states
from kit.cost.memory.offload import host_ram_gib_per_node
from kit.cost.memory.peak import parts_of
from kit.cost.time.step import step_time_components_s
from kit.cost.workload import Workload
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
from kit.units import to_gib

BYTES: dict[OptimizerName, float] = {"adamw": 8.0, "adamw-8bit": 2.0}
"""Two moments in fp32, or two codes of a byte."""
SPLITS = [("1xH100", 0, 1), ("8xH100", 0, 1), ("8xH100", 3, 1), ("8xH100", 3, 2)]


def planned(gpus: str, zero: int, tp: int = 1, name: OptimizerName = "adamw", paged: bool = True) -> Plan:
    pins = Pins(engine="torch", zero_stage=zero, tp=tp, paged_optimizer=paged, recompute="full", micro_batch_size=1)
    job = JobSpec(optimizer=OptimizerSpec(name=name), seq_length=2048)
    return make_plan(load_model("llama-3.2-1b"), parse_cluster(gpus), job, pins)


def both(*how: int | str, name: OptimizerName) -> tuple[Workload, Workload]:
    """The paged workload and the same without paging."""
    paged = planned(*how, name=name).workload  # type: ignore[arg-type]
    return paged, paged.with_layout(paged.layout.but(paged_optimizer=False))


def moments(w: Workload) -> float:
    """Bytes that a rank pages: the matrices it steps, from the model's own table."""
    parameters = w.parameters[0]
    ranks = w.layout.dp if w.layout.zero_stage else 1
    return BYTES[w.job.optimizer.name] * (parameters.total - parameters.vectors) / ranks


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("how", SPLITS, ids=str)
def test_memory_and_seconds_differ_by_the_bytes_of_moments(how: tuple[str, int, int], name: OptimizerName) -> None:
    paged, plain = both(*how, name=name)
    on_gpu = [parts_of(each, 0).states.optimizer for each in (plain, paged)]
    assert on_gpu[0] - on_gpu[1] == pytest.approx(moments(paged), rel=1e-9)
    assert on_gpu[1] >= 0
    assert host_ram_gib_per_node(plain) == 0
    ranks = paged.layout.world_size / paged.cluster.num_nodes
    assert host_ram_gib_per_node(paged) == pytest.approx(to_gib(moments(paged)) * ranks, rel=1e-9)
    seconds = [step_time_components_s(each) for each in (plain, paged)]
    link = 2 * moments(paged) / pcie_bytes_per_s(paged.cluster.gpu)
    assert seconds[1]["offload"] == pytest.approx(link, rel=1e-9)
    assert {**seconds[1], "offload": 0.0} == seconds[0]


def test_moments_that_are_on_both_sides_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the GPU's count forgets that they left."""
    monkeypatch.setattr(states, "paged_moment_bytes", lambda *_: 0.0)
    engine._engine_memory.cache_clear()
    try:
        with pytest.raises(AssertionError, match=r"assert 0\.0 =="):
            test_memory_and_seconds_differ_by_the_bytes_of_moments(SPLITS[0], "adamw")
    finally:
        engine._engine_memory.cache_clear()


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
