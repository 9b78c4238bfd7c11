"""No layout that fits stays untried: what saves memory, and what engines have on request alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kit.errors import PlanError
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.planner.search import EQUALLY_FAST
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec, LoraSpec
from kit.specs.layout import Pins
from tests.support.refusals import refusal

QLORA = LoraSpec(four_bit=True)


def tuned(
    model: str, gpus: str, pins: Pins | None = None, lora: LoraSpec | None = None, seq_length: int = 16384
) -> Plan:
    job = JobSpec(objective="sft", seq_length=seq_length, global_batch_size=8, lora=lora)
    return make_plan(load_model(model), parse_cluster(gpus), job, pins)


def stays_on_the_gpu(plan: Plan) -> bool:
    layout = plan.layout
    return (layout.offload_optimizer, layout.offload_param, layout.activation_offloading) == ("none", "none", False)


# ---------------------------------------------------------------- fine-tuning


@pytest.mark.parametrize("gpus", ["1xRTX-4090", "2xRTX-4090"])
def test_8b_by_qlora_with_16k_tokens_fits_24_gb_with_a_chunked_loss(gpus: str) -> None:
    """unsloth#4330: logits of 152k words times 16k tokens are what does not fit."""
    plan = tuned("qwen3-8b", gpus, lora=QLORA)
    assert plan.layout.chunked_loss
    assert stays_on_the_gpu(plan)
    assert plan.predicted.peak_gib < 17
    assert "layout.chunked_loss left to the planner instead of False" in refusal(
        PlanError, tuned, "qwen3-8b", gpus, Pins(chunked_loss=False, activation_offloading=False), QLORA
    )


def test_what_fits_on_the_gpu_and_is_as_fast_wins_over_the_host() -> None:
    """At 8k tokens the weights fit on the host too, and are no faster there."""
    plan = tuned("qwen3-8b", "1xRTX-4090", lora=QLORA, seq_length=8192)
    assert stays_on_the_gpu(plan)
    on_host = tuned("qwen3-8b", "1xRTX-4090", Pins(engine="deepspeed", offload_param="cpu"), QLORA, 8192)
    assert plan.predicted.step_time_s <= EQUALLY_FAST * on_host.predicted.step_time_s


def test_a_chunked_loss_that_spares_recompute_is_taken_where_all_would_fit() -> None:
    plan = make_plan(
        load_model("llama-3.1-8b"),
        parse_cluster("8xH100"),
        JobSpec(objective="sft", seq_length=4096, global_batch_size=128),
        Pins(engine="torch", zero_stage=3),
    )
    assert (plan.layout.chunked_loss, plan.layout.recompute) == (True, "none")


def test_layer_inputs_on_the_host_and_tiles_are_weighed_too() -> None:
    """32B at 20k tokens on four A100 (accelerate#3647), at 32k by DeepSpeed, and 0.6B at 131k on one card."""
    plan = tuned("qwen3-0.6b", "1xRTX-4090", Pins(engine="torch"), seq_length=131072)
    assert (plan.layout.chunked_loss, plan.layout.tiled_mlp, plan.layout.recompute) == (True, True, "full")
    assert tuned("qwen3-32b", "4xA100-80", seq_length=20480).predicted.peak_gib < 75
    assert tuned("qwen3-32b", "4xA100-80", Pins(engine="deepspeed"), seq_length=32768).layout.chunked_loss


def test_layer_inputs_beside_offloaded_weights_are_a_last_resort() -> None:
    """65k tokens of 8B on one card; where anything else fits, the host's link carries one of them."""
    plan = tuned("qwen3-8b", "1xRTX-4090", lora=QLORA, seq_length=65536)
    (said,) = (decision for decision in plan.decisions if decision.rule == "last_resort")
    assert (plan.layout.offload_param, plan.layout.activation_offloading) == ("cpu", True)
    assert said.chosen == "saved layer inputs on the host beside offloaded state"
    assert "layout.activation_offloading=false forbids it" in said.why
    assert "does not fit" in refusal(
        PlanError, tuned, "qwen3-8b", "1xRTX-4090", Pins(activation_offloading=False), QLORA, 65536
    )


# ---------------------------------------------------------------- on request alone


@pytest.mark.parametrize(
    "pins", [Pins(recompute="selective", recompute_modules=("mlp",)), Pins(implementation="transformer_engine")]
)
def test_on_one_gpu_megatron_is_tried_where_a_pin_is_its_own(pins: Pins) -> None:
    """1.5B in 80 GB: 18 bytes a parameter are 26 GiB, and nothing has to leave the GPU."""
    model, cluster = load_model("qwen2.5-1.5b"), parse_cluster("1xH100")
    plan = make_plan(model, cluster, JobSpec(), pins)
    assert plan.layout.engine == "megatron"
    assert stays_on_the_gpu(plan)
    assert "last_resort" not in {decision.rule for decision in plan.decisions}
    assert plan.layout == make_plan(model, cluster, JobSpec(), pins.but(engine="megatron")).layout


def test_the_planner_turns_to_disks_where_host_memory_is_short() -> None:
    cluster = replace(parse_cluster("1xA100-40"), host_ram_gib=200.0, nvme_gib=2000.0)
    plan = make_plan(load_model("llama-2-13b"), cluster, JobSpec(seq_length=2048, global_batch_size=128))
    assert "nvme" in (plan.layout.offload_optimizer, plan.layout.offload_param)
    assert plan.predicted.nvme_gib_per_node > 100
    assert "does not fit" in refusal(
        PlanError,
        make_plan,
        load_model("llama-2-13b"),
        replace(cluster, nvme_gib=None),
        JobSpec(seq_length=2048, global_batch_size=128),
    )
