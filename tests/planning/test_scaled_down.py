"""Scaled-down copies: same kinds of parallelism, small enough for CPU processes, legal, every replacement named."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import pytest

from kit.emit.extra import with_extra
from kit.errors import SpecError
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.rehearsal.scaled_down import MOST_PROCESSES, _small, _tiny, scaled_down
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.extra import Extra
from kit.specs.job import TRL, JobSpec
from kit.specs.layout import Layout
from kit.specs.shipped import recipe_names
from scripts.shipped_files import shipped_plan
from tests.planning.shapes import by_hand
from tests.support.refusals import refusal

SIZES = ("tp", "pp", "vp", "cp", "ep", "etp", "dp", "zero_hpz")
SAME = ("engine", "implementation", "sp", "zero_stage", "offload_optimizer", "offload_param", "recompute")


def planned(name: str) -> Plan:
    plan = shipped_plan(name)
    assert plan is not None
    return plan


@pytest.mark.parametrize("name", recipe_names())
def test_a_copy_is_legal_small_and_of_the_same_kinds(name: str) -> None:
    plan = planned(name)
    shrunk = scaled_down(plan)
    small = make_plan(shrunk.model, shrunk.cluster, shrunk.job, shrunk.pins).layout
    assert small.world_size == shrunk.cluster.num_gpus <= MOST_PROCESSES
    assert {key: getattr(small, key) for key in SAME} == {key: getattr(plan.layout, key) for key in SAME}
    gone = {text.split("=")[0] for text in shrunk.replaced}
    assert {key for key in SIZES if (getattr(small, key) > 1) != (getattr(plan.layout, key) > 1)} <= gone
    assert (shrunk.model.family, shrunk.job.lora is None) == (plan.model.family, plan.job.lora is None)
    assert shrunk.job.objective == ("sft" if plan.job.objective in TRL else plan.job.objective)
    assert plan.job.precision == "fp32" or any(
        text.startswith(f"precision={plan.job.precision}") for text in shrunk.replaced
    )


def test_what_only_the_whole_run_has_is_replaced_by_name() -> None:
    extra = Extra(deepspeed={"memory_breakdown": True})
    shrunk = scaled_down(with_extra(planned("llama-3.1-8b-sft-zero3-8xa100-80"), extra))
    assert "extra: deepspeed.memory_breakdown=True -> left out: not of the plan" in shrunk.replaced


MEGATRON = Layout(engine="megatron", implementation="local", tp=8, micro_batch_size=4, gradient_accumulation_steps=8)
ENDS = MEGATRON.but(pp=8, first_stage_layers=3, last_stage_layers=5)


@pytest.mark.parametrize(
    ("layout", "sizes", "layers"),
    [
        (MEGATRON, (2, 1, 1, 1, 1, 2, 2), 2),
        (MEGATRON.but(dp=4, cp=4), (2, 1, 1, 2, 2, 2, 2), 2),
        (MEGATRON.but(pp=8, dp=3), (2, 2, 1, 1, 2, 2, 2), 2),
        (MEGATRON.but(pp=8, vp=3, dp=2), (2, 4, 2, 1, 2, 2, 4), 8),
        (MEGATRON.but(pp=8, vp=3, cp=4, dp=4), (2, 4, 2, 2, 1, 2, 4), 8),
        (MEGATRON.but(micro_batch_size=1, gradient_accumulation_steps=1), (2, 1, 1, 1, 1, 1, 1), 2),
        (ENDS, (2, 2, 1, 1, 1, 2, 2), 3),
        (ENDS.but(vp=2), (2, 4, 1, 1, 1, 2, 4), 6),
    ],
)
def test_sizes_by_hand(layout: Layout, sizes: tuple[int, ...], layers: int) -> None:
    """tp, pp, vp, cp, dp, sequences in a micro batch, micro batches; and layers. Sixteen processes at most."""
    small, replaced = _small(layout)
    names = ("tp", "pp", "vp", "cp", "dp", "micro_batch_size", "gradient_accumulation_steps")
    assert tuple(getattr(small, name) for name in names) == sizes
    assert _tiny(load_model("llama-3.1-8b"), small).num_layers == layers
    assert replaced == (["dp=4 -> 1: 16 processes are the limit"] if layout.dp == 4 and sizes[4] == 1 else [])


def tiny(name: str, *fields: str) -> list[Any]:
    """Fields of a copy's model; those of latent attention behind a point."""
    return [*operator.attrgetter(*fields)(_tiny(load_model(name), MEGATRON.but(tp=1)))]


EXPERTS = ("num_experts", "moe_ffn_hidden_size", "num_shared_experts")
JOB = ("seq_length", "total_tokens", "epochs", "precision", "learning_rate")
test_value = by_hand([
    ("DeepSeek's experts", lambda: tiny("deepseek-v3", *EXPERTS, "experts_per_token", "router_groups",
     "router_top_groups", "first_dense_layers", "ffn_hidden_size", "head_dim"), [8, 32, 1, 2, 2, 1, 1, 64, 16]),
    ("DeepSeek's attention", lambda: tiny("deepseek-v3", *(f"latent.{name}" for name in (
        "q_lora_rank", "kv_lora_rank", "rope_head_dim", "value_head_dim"))), [16, 16, 8, 8]),
    ("Mixtral", lambda: tiny("mixtral-8x7b", *EXPERTS), [4, 64, 0]),
    ("Mistral", lambda: tiny("mistral-7b-v0.1", "sliding_window", "num_key_value_heads", "hidden_size"), [32, 2, 32]),
    ("GPT-2", lambda: tiny("gpt2", "num_key_value_heads", "num_attention_heads"), [4, 4]),
    ("two stacks", lambda: tiny("bart-large", "encoder_layers", "num_layers"), [2, 2]),
    ("the job", lambda: operator.attrgetter(*JOB, "optimizer.eps", "lora.rank", "lora.dropout")(
        scaled_down(planned("llama-3-70b-qlora-2xrtx-4090")).job), (64, None, None, "fp32", 1e-3, 1e-4, 4, 0.0)),
])  # fmt: skip


def test_what_a_cpu_cannot_do_is_replaced_by_name() -> None:
    plan = planned("llama-3.1-8b-sft-zero3-8xa100-80")
    layout = dataclasses.replace(plan.layout, zero_hpz=8, zero_quantized_weights=True, zero_quantized_gradients=True)
    shrunk = scaled_down(dataclasses.replace(plan, layout=layout))
    assert shrunk.pins.zero_quantized_weights is False
    assert sum("zero_quantized" in text for text in shrunk.replaced) == 2
    assert (shrunk.pins.zero_hpz, shrunk.cluster.num_gpus) == (2, 4)


def test_megatrons_optimizer_is_on_the_host_in_bf16_alone() -> None:
    plan = planned("llama-3-70b-pretrain-best-64xa100-40")
    layout = plan.layout.but(offload_optimizer="cpu", optimizer_offload_fraction=0.5)
    shrunk = scaled_down(dataclasses.replace(plan, layout=layout))
    assert shrunk.pins.offload_optimizer == "none"
    assert any(text.startswith("offload_optimizer=cpu -> none") for text in shrunk.replaced)
    assert shrunk.job_in_bf16 is not None
    rounded = make_plan(shrunk.model, shrunk.cluster, shrunk.job_in_bf16, shrunk.pins_in_bf16).layout
    assert (rounded.offload_optimizer, rounded.optimizer_offload_fraction) == ("cpu", 0.5)


@pytest.mark.parametrize(
    ("model", "gpus", "engine", "precision", "said"),
    [
        ("llama-3.2-1b", "1xH100", "torch", "fp8", "emulated"),
        ("llama-3.1-8b", "8xH100", "megatron", "bf16", "precision=fp8 -> bf16"),
    ],
)
def test_eight_bits_are_emulated_on_the_torch_engine_and_replaced_on_megatrons(
    model: str, gpus: str, engine: str, precision: str, said: str
) -> None:
    plan = make_plan(load_model(model), parse_cluster(gpus), JobSpec(precision="fp8"))
    shrunk = scaled_down(plan)
    assert (plan.layout.engine, shrunk.job_in_bf16.precision) == (engine, precision)
    assert any(said in text for text in shrunk.replaced)


def test_a_model_that_no_family_describes_is_refused() -> None:
    described = make_plan(load_model("qwen3-0.6b"), parse_cluster("8xH100"), JobSpec())
    assert "deepseek-v3.2 is of type deepseek_v32, which is planned approximately" in refusal(
        SpecError, scaled_down, dataclasses.replace(described, model=load_model("deepseek-v3.2"))
    )
