"""What a plan says of its choices agrees with its numbers."""

from __future__ import annotations

import re
from dataclasses import replace

from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.planner.search import EQUALLY_FAST
from kit.report.view import view_of
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.layout import Pins, describe
from kit.units import human_seconds
from tests.support.models import job


def plan_of(name: str, machines: str, pins: Pins | None = None, **changes: object) -> Plan:
    return make_plan(load_model(name), parse_cluster(machines), job(**changes), pins)


def reason(plan: Plan, rule: str) -> str:
    (found,) = [decision for decision in plan.decisions if decision.rule == rule]
    return " ".join([found.why, *found.rejected])


def test_a_rejected_value_says_what_else_has_to_change() -> None:
    """Sizes of the other way to split; those of the same split where it is a choice within one."""
    plan = plan_of("llama-3-70b", "128xA100-80", global_batch_size=512)
    other = {4: 8, 8: 4}[plan.layout.tp]
    assert re.search(rf"{other}: [\d.]+ (s|min) a step, [\d.]+ GiB \(with pp=\d+", reason(plan, "tp"))
    within = reason(plan, "vp")
    assert "a step" in within
    assert "tp=" not in within
    assert "pp=" not in within


def test_a_host_with_too_little_memory_is_why_state_goes_to_disks() -> None:
    plan = plan_of("llama-2-13b", "1xH100")
    assert plan.layout.offload_optimizer == "nvme"
    assert re.search(r"cpu: offload needs \d+ GiB of host memory a node", reason(plan, "offload_optimizer"))


TE = "transformer_engine"


def test_the_faster_layout_with_transformer_engine_is_said_and_taken_where_it_is_installed() -> None:
    def planned(machines: str, pins: Pins | None = None, installed: bool = False, model: str = "llama-3-8b") -> Plan:
        return make_plan(load_model(model), replace(parse_cluster(machines), transformer_engine=installed), job(), pins)

    without, with_it = planned("8xH100"), planned("8xH100", installed=True)
    now, then = without.predicted.step_time_s, with_it.predicted.step_time_s
    (said,) = (each for each in without.decisions if each.rule == "implementation")
    assert said.why == (
        f"with transformer_engine installed: {then:.2f} s a step, {1 - then / now:.1%} less "
        f"({describe(with_it.layout)}); cluster.transformer_engine=true takes it"
    )
    assert said in view_of(without).notes
    assert (with_it.layout.implementation, said.chosen, then < now / EQUALLY_FAST) == (TE, "local", True)
    others = [
        with_it,
        planned("8xMI300X"),
        planned("8xH100", Pins(implementation="local")),
        planned("8xH100", Pins(engine="torch")),
        planned("8xH100", Pins(implementation=TE)),
        planned("8xcpu", model="smollm2-135m"),
    ]
    assert [each.rule for plan in others for each in plan.decisions].count("implementation") == 0
    assert planned("8xH100", Pins(implementation="local"), True).layout.implementation == "local"
    # Megatron-core has no such layers for this family.
    assert planned("8xH100", Pins(engine="megatron"), True, "smollm3-3b").layout.implementation == "local"


def test_where_a_pin_leads_to_offload_the_faster_layout_without_it_is_said() -> None:
    pinned = plan_of("llama-2-13b", "8xA100-40", Pins(zero_stage=2, micro_batch_size=1), objective="sft")
    freed = plan_of("llama-2-13b", "8xA100-40", Pins(micro_batch_size=1), objective="sft")
    now, then = pinned.predicted.step_time_s, freed.predicted.step_time_s
    (said,) = (each for each in view_of(pinned).notes if each.rule == "pin")
    assert (pinned.layout.offload_optimizer, freed.layout.offload_optimizer, said.chosen) == (
        "cpu", "none", "zero_stage=2",
    )  # fmt: skip
    assert said.why == (
        f"with this pin the plan has its optimizer on the host; layout.zero_stage={freed.layout.zero_stage} needs no "
        f"offload: {human_seconds(then, like=now)} a step, {1 - then / now:.1%} less ({describe(freed.layout)})"
    )
    # The engine stays, though Megatron would be faster still.
    by_engine = plan_of("llama-2-13b", "8xA100-80", Pins(engine="deepspeed", zero_stage=1), objective="sft")
    assert [each.chosen for each in by_engine.decisions if each.rule == "pin"] == ["zero_stage=1"]
    # Not where offload is pinned, or nothing is; and no pin is named without which it is not faster.
    asked = plan_of("llama-3.1-8b", "8xA100-80", Pins(engine="deepspeed", offload_optimizer="cpu"), objective="sft")
    needed = plan_of("llama-3-70b", "8xH100", Pins(recompute="full"), objective="sft")
    assert (asked.layout.offload_optimizer, needed.layout.offload_optimizer) == ("cpu", "cpu")
    assert all(each.rule != "pin" for plan in (freed, asked, needed) for each in plan.decisions)


SLOW, FAST = 25 / 8 / 8, 25.0
"""GB/s a GPU: 25 Gbit/s Ethernet a node of eight, and 200 Gbit/s InfiniBand a GPU."""


def linked(gbytes_per_s: float, gpus: str = "64xA100-80") -> ClusterSpec:
    return replace(parse_cluster(gpus), inter_node_gbytes_per_s=gbytes_per_s)


def test_the_planner_takes_the_lossless_and_names_the_lossy() -> None:
    pins = Pins(engine="deepspeed", zero_stage=3)
    wanted = job(seq_length=4096, global_batch_size=256)
    slow = make_plan(load_model("llama-3.1-8b"), linked(SLOW), wanted, pins)
    assert slow.layout.zero_hpz == 8
    assert not slow.layout.zero_quantized_weights
    (remark,) = [decision for decision in slow.decisions if decision.rule == "gradient_compression"]
    assert any("zero_quantized_gradients" in line for line in remark.rejected)
    for quiet in (linked(FAST), parse_cluster("8xA100-80")):
        fast = make_plan(load_model("llama-3.1-8b"), quiet, wanted, pins)
        assert not [decision for decision in fast.decisions if decision.rule == "gradient_compression"]
    assert fast.layout.zero_hpz == 1  # one node has no slower links to spare
