"""Every rule: a layout that breaks it and the same layout mended."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from kit.planner.rule import divisors
from kit.planner.rules import RULES, is_legal, violations
from kit.specs.catalog import load_model
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from tests.planning.examples import cluster, deepspeed, job, megatron, torch

LLAMA = "llama-3.1-8b"


def filled(layout: Layout, gpus: int, sequences: int) -> Layout:
    """dp and accumulation so that GPUs and batch come out."""
    dp = gpus // (layout.tp * layout.pp * layout.cp)
    steps = max(1, sequences // (layout.micro_batch_size * dp))
    return dataclasses.replace(layout, dp=dp, gradient_accumulation_steps=steps)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout that breaks exactly ``rule``, what must be said, and a mended one."""

    rule: str
    bad: Layout
    said: str
    good: Layout
    model: str = LLAMA
    shape: ModelSpec | None = None
    """Instead of a model of the catalog."""
    gpus: str = "8xH100"
    change: dict[str, Any] = dataclasses.field(default_factory=dict)
    good_gpus: str | None = None
    good_change: dict[str, Any] | None = None


STARCODER = ModelSpec(
    name="starcoder",
    family="starcoder2",
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=1024,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=32,
    vocab_size=1000,
    max_position_embeddings=4096,
)

OVER_MEGATRON = dataclasses.replace(deepspeed(zero_stage=3, tp=2, sp=True), implementation="torch-native")

CASES = [
    Case("world_size", megatron(tp=2, dp=2, gradient_accumulation_steps=64), "use dp=4", megatron(tp=2)),
    Case("batch", deepspeed(zero_stage=2, micro_batch_size=3), "global_batch_size=120 or 144", deepspeed(zero_stage=2)),
    Case(
        "precision",
        torch(),
        "Titan-RTX, which has no bf16",
        torch(),
        gpus="1xTitan-RTX",
        good_change={"precision": "fp32"},
    ),
    Case(
        "positions",
        torch(),
        "use at most 1024",
        torch(),
        model="gpt2",
        change={"seq_length": 2048},
        good_change={"seq_length": 1024},
    ),
    Case(
        "implementation",
        dataclasses.replace(torch(), implementation="torch-native"),
        "use huggingface-sdpa",
        torch(),
    ),
    Case(
        "stacks",
        torch(),
        "use pretrain or sft",
        torch(),
        change={"objective": "seq2seq"},
        good_change={"objective": "sft"},
    ),
    Case(
        "stacks",
        deepspeed(zero_stage=1),
        "use seq2seq",
        deepspeed(zero_stage=1),
        model="bart-large",
        change={"seq_length": 128},
        good_change={"seq_length": 128, "objective": "seq2seq"},
    ),
    Case("data_parallel_only", torch(sp=True), "sp=True on engine=torch", torch()),
    Case(
        "fp16_needs_cuda",
        deepspeed(zero_stage=2),
        "use bf16 or fp32",
        deepspeed(zero_stage=2),
        gpus="2xcpu",
        change={"precision": "fp16"},
        good_gpus="1xTitan-RTX",
        good_change={"precision": "fp16"},
    ),
    Case(
        "fp16_needs_zero",
        deepspeed(),
        "a loss scale that it never",
        deepspeed(zero_stage=2),
        change={"precision": "fp16"},
        good_change={"precision": "fp16"},
    ),
    Case(
        "supported_job",
        torch(zero_stage=2),
        "precision=fp16 is not supported",
        deepspeed(zero_stage=2),
        change={"precision": "fp16"},
        good_change={"precision": "fp16"},
    ),
    Case(
        "fp8",
        megatron(),
        "use implementation=transformer-engine, or bf16",
        megatron(implementation="transformer-engine"),
        change={"precision": "fp8"},
        good_change={"precision": "fp8"},
    ),
    Case(
        "fp8",
        megatron(implementation="transformer-engine"),
        "A100-80, which has no fp8",
        megatron(implementation="transformer-engine"),
        gpus="8xA100-80",
        good_gpus="8xH100",
        change={"precision": "fp8"},
        good_change={"precision": "fp8"},
    ),
    Case(
        "implementation",
        megatron(implementation="transformer-engine"),
        "its kernels are for GPUs",
        megatron(),
        gpus="8xcpu",
    ),
    Case("autocast_is_deepspeeds", torch(autocast=True), "always autocasts", torch()),
    Case(
        "autocast_is_deepspeeds",
        deepspeed(zero_stage=2, autocast=True),
        "use precision=bf16",
        deepspeed(zero_stage=2, autocast=True),
        change={"precision": "fp32"},
        good_change={"precision": "bf16"},
    ),
    Case(
        "autocast_is_deepspeeds",
        deepspeed(autocast=True),
        "use zero_stage=1, 2 or 3",
        deepspeed(zero_stage=1, autocast=True),
    ),
    Case(
        "autocast_is_deepspeeds",
        deepspeed(zero_stage=3, autocast=True, zero_quantized_weights=True),
        "DeepSpeed refuses together",
        deepspeed(zero_stage=3, zero_quantized_weights=True),
    ),
    Case(
        "compression_has_a_hook",
        torch(zero_stage=2, gradient_compression="powersgd"),
        r"zero_stage=0 \(DDP\)",
        torch(gradient_compression="powersgd"),
    ),
    Case("compression_has_a_hook", torch(gradient_compression="bf16"), "nothing is sent", torch(), gpus="1xH100"),
    Case(
        "compression_has_a_hook",
        deepspeed(zero_stage=2, gradient_compression="bf16"),
        "in 16 bits as they are",
        deepspeed(zero_stage=2, gradient_compression="bf16"),
        good_change={"precision": "fp32"},
    ),
    Case("compression_has_a_hook", megatron(gradient_compression="bf16"), "engine=megatron", megatron()),
    Case(
        "zeropp",
        deepspeed(zero_stage=2, zero_hpz=2),
        "use engine=deepspeed with zero_stage=3",
        deepspeed(zero_stage=3, zero_hpz=2),
    ),
    Case(
        "zeropp", torch(zero_stage=3, zero_quantized_weights=True), "part of DeepSpeed's stage 3", torch(zero_stage=3)
    ),
    Case(
        "zeropp",
        deepspeed(zero_stage=3, zero_quantized_weights=True),
        "kernels are for CUDA",
        deepspeed(zero_stage=3, zero_hpz=2),
        gpus="2xcpu",
    ),
    Case(
        "zeropp",
        deepspeed(zero_stage=3, zero_quantized_weights=True),
        "compute in 16 bits",
        deepspeed(zero_stage=3, zero_quantized_weights=True),
        change={"precision": "fp32"},
        good_change={"precision": "bf16"},
    ),
    Case("zeropp", deepspeed(zero_stage=3, zero_hpz=2, tp=2), "use tp=1 and cp=1", deepspeed(zero_stage=3, zero_hpz=2)),
    Case(
        "hpz_divides_ranks",
        deepspeed(zero_stage=3, zero_hpz=16),
        "use 1, 2, 4 or 8",
        deepspeed(zero_stage=3, zero_hpz=8),
        gpus="64xA100-80",
    ),
    Case(
        "hpz_divides_ranks",
        deepspeed(zero_stage=3, zero_hpz=2, offload_param="cpu", offload_optimizer="cpu"),
        "would be offloaded",
        deepspeed(zero_stage=3, zero_hpz=2, offload_optimizer="cpu"),
        gpus="8xA100-40",
    ),
    Case(
        "quantized_gradients_need_nodes",
        deepspeed(zero_stage=3, zero_quantized_gradients=True),
        "on one node",
        deepspeed(zero_stage=3, zero_quantized_gradients=True),
        good_gpus="16xH100",
    ),
    Case(
        "deepspeed_splits",
        deepspeed(zero_stage=2, pp=2),
        "zero_stage=2 excludes pipeline parallelism",
        deepspeed(zero_stage=2),
    ),
    Case("deepspeed_splits", deepspeed(zero_stage=1, pp=2), "takes no Hugging Face model", megatron(pp=2)),
    Case("deepspeed_splits", deepspeed(zero_stage=1, ep=2), "ep=2 on engine=deepspeed", deepspeed(zero_stage=1)),
    Case(
        "deepspeed_tensor_parallel",
        dataclasses.replace(deepspeed(zero_stage=1), implementation="torch-native"),
        "use tp>1",
        dataclasses.replace(deepspeed(zero_stage=1, tp=2), implementation="torch-native"),
    ),
    Case(
        "deepspeed_tensor_parallel",
        deepspeed(zero_stage=1, tp=2, cp=2, cp_comm_type="a2a"),
        "one or the other",
        deepspeed(zero_stage=1, cp=2, cp_comm_type="a2a"),
    ),
    Case(
        "deepspeed_tensor_parallel",
        deepspeed(zero_stage=1, tp=16),
        "use 1, 2, 4 or 8",
        deepspeed(zero_stage=1, tp=8),
        gpus="16xH100",
    ),
    Case(
        "deepspeed_tensor_parallel",
        deepspeed(zero_stage=1, tp=2),
        "with the experts",
        deepspeed(zero_stage=1),
        model="mixtral-8x7b",
    ),
    Case(
        "deepspeed_tensor_parallel",
        deepspeed(zero_stage=3, tp=2, offload_optimizer="nvme"),
        "offload to cpu",
        deepspeed(zero_stage=3, tp=2, offload_optimizer="cpu"),
        gpus="8xA100-40",
    ),
    Case(
        "deepspeed_tensor_parallel",
        deepspeed(zero_stage=1, tp=2),
        "AutoTP cannot cut",
        dataclasses.replace(deepspeed(zero_stage=1, tp=2), implementation="torch-native"),
        model="phi-3-mini-4k",
    ),
    Case("ulysses", deepspeed(zero_stage=3, cp=2), "use a2a", deepspeed(zero_stage=3, cp=2, cp_comm_type="a2a")),
    Case(
        "ulysses",
        deepspeed(zero_stage=3, cp=8, cp_comm_type="a2a"),
        "use 1, 2, 4, 7, 14 or 28",
        deepspeed(zero_stage=3, cp=4, cp_comm_type="a2a"),
        model="qwen2.5-7b",
    ),
    Case(
        "ulysses",
        deepspeed(zero_stage=3, cp=2, cp_comm_type="a2a"),
        "drops attention masks",
        deepspeed(zero_stage=3),
        model="mistral-7b-v0.1",
        change={"seq_length": 8192},
    ),
    Case("deepspeed_splits", deepspeed(zero_stage=1, tp=2, sp=True), "sp=true on engine=deepspeed", OVER_MEGATRON),
    Case(
        "ulysses",
        deepspeed(zero_stage=3, cp=2, cp_comm_type="a2a"),
        "another length",
        deepspeed(zero_stage=3, cp=2, cp_comm_type="a2a"),
        change={"seq_length": 4095},
        good_change={"seq_length": 4096},
    ),
    Case("torch_tensor_parallel", torch(tp=2), "goes with FSDP2", torch(tp=2, zero_stage=3)),
    Case(
        "torch_tensor_parallel",
        torch(tp=2, zero_stage=3),
        "it is done for llama, mistral, qwen2",
        torch(zero_stage=3),
        model="gpt2",
        change={"seq_length": 1024},
    ),
    Case(
        "torch_tensor_parallel",
        torch(tp=16, zero_stage=3),
        "use a divisor of both",
        torch(tp=8, zero_stage=3),
        gpus="16xH100",
    ),
    Case("torch_zero", torch(zero_stage=1), r"FSDP2 \(2 and 3\)", torch(zero_stage=3)),
    Case("no_offload", megatron(offload_optimizer="cpu"), "offload_optimizer=cpu on engine=megatron", megatron()),
    Case(
        "offload_needs_zero",
        deepspeed(zero_stage=2, offload_optimizer="cpu", offload_param="cpu"),
        "only stage 3 partitions",
        deepspeed(zero_stage=3, offload_optimizer="cpu", offload_param="cpu"),
    ),
    Case(
        "offload_needs_zero",
        deepspeed(zero_stage=2, offload_optimizer="nvme"),
        "only stage 3 swaps",
        deepspeed(zero_stage=3, offload_optimizer="nvme"),
    ),
    Case(
        "offload_needs_zero",
        deepspeed(zero_stage=0, offload_optimizer="cpu"),
        "use zero_stage=1, 2 or 3",
        deepspeed(zero_stage=1, offload_optimizer="cpu"),
    ),
    Case(
        "host_ram",
        deepspeed(zero_stage=3, offload_optimizer="cpu"),
        "give cluster.host_ram_gib",
        deepspeed(zero_stage=3, offload_optimizer="cpu"),
        gpus="hgx-h200",
        good_gpus="dgx-h200",
    ),
    Case(
        "host_ram",
        deepspeed(zero_stage=3, offload_optimizer="cpu"),
        "are usable; offload to nvme",
        deepspeed(zero_stage=3, offload_optimizer="cpu"),
        model="llama-3-70b",
        gpus="8xA100-40",
        good_gpus="16xA100-40",
    ),
    Case(
        "nvme",
        deepspeed(zero_stage=3, offload_optimizer="nvme"),
        "whose disks are unknown",
        deepspeed(zero_stage=3, offload_optimizer="nvme"),
        model="gpt2",
        gpus="1xRTX-4090",
        good_gpus="8xA100-40",
        change={"seq_length": 1024},
        good_change={"seq_length": 1024},
    ),
    Case(
        "supported_job",
        torch(),
        "precision=fp16 is not supported; use bf16 or fp32",
        torch(),
        change={"precision": "fp16"},
        good_change={"precision": "fp32"},
    ),
    Case("megatron_family", megatron(), "which has llama, mistral", torch(zero_stage=3), shape=STARCODER),
    Case(
        "expert_router",
        megatron(),
        "norm_topk_prob=False, experts_per_token=8 of deepseek-v3",
        torch(zero_stage=3),
        shape=dataclasses.replace(load_model("deepseek-v3"), norm_topk_prob=False),
    ),
    Case(
        "expert_router",
        megatron(),
        "router_top_groups=2 with experts_per_token=8",
        torch(zero_stage=3),
        shape=dataclasses.replace(load_model("deepseek-v3"), router_top_groups=2),
    ),
    Case("ring", megatron(cp=2, cp_comm_type="p2p"), "values are narrower", megatron(cp=2), model="deepseek-v3"),
    Case("ring", megatron(cp=2, cp_comm_type="p2p"), "no flash kernel computes", megatron(cp=2), model="gemma-2-9b"),
    Case("supported_split", torch(recompute="selective"), "recompute=selective is not supported", torch()),
    Case("megatron_zero", megatron(zero_stage=2), "distributed optimizer is stage 1", megatron(zero_stage=1)),
    Case("tp_divides_heads", megatron(tp=8), "use 1, 2, 4, 7, 14 or 28", megatron(tp=4), model="qwen2.5-7b"),
    Case(
        "pipeline_divides_layers",
        megatron(pp=4),
        "pp=4 does not divide num_layers=126",
        megatron(pp=2),
        model="llama-3.1-405b",
    ),
    Case("pipeline_divides_layers", megatron(pp=4, vp=3), "pp·vp=4·3", megatron(pp=4, vp=4)),
    Case(
        "pipeline_divides_layers",
        megatron(pp=8, first_stage_layers=15),
        "leave 111 layers of llama-3.1-405b for 7 other stages; leave a multiple of 7",
        megatron(pp=8, first_stage_layers=15, last_stage_layers=15),
        model="llama-3.1-405b",
    ),
    Case(
        "pipeline_divides_layers",
        megatron(pp=2, first_stage_layers=15, last_stage_layers=16),
        "first_stage_layers=15, last_stage_layers=16 are not num_layers=32",
        megatron(pp=2, first_stage_layers=15, last_stage_layers=17),
    ),
    Case(
        "pipeline_divides_layers",
        megatron(pp=4, vp=8, first_stage_layers=5, last_stage_layers=11),
        "use at least 7 layers",
        megatron(pp=4, vp=8, first_stage_layers=7, last_stage_layers=9),
    ),
    Case("pipeline_divides_layers", megatron(first_stage_layers=15), "with pp=1: there is one stage", megatron()),
    Case("deepspeed_splits", deepspeed(last_stage_layers=3), "last_stage_layers=3 on engine=deepspeed", deepspeed()),
    Case("virtual_stages", megatron(vp=2), "vp=2 with pp=1", megatron(pp=2, vp=2)),
    Case(
        "virtual_stages",
        megatron(pp=4, vp=2),
        "groups of pp=4",
        megatron(pp=4, vp=2),
        change={"global_batch_size": 12},
        good_change={"global_batch_size": 16},
    ),
    Case("expert_parallel", megatron(ep=2), "has no experts", megatron()),
    Case("expert_parallel", megatron(ep=16), "ep=16 does not divide", megatron(ep=8), model="mixtral-8x7b"),
    Case("expert_parallel", megatron(pp=4, ep=4), "ep·etp=4·1 does not", megatron(pp=4, ep=2), model="mixtral-8x7b"),
    Case(
        "expert_tensor_parallel",
        megatron(tp=2, sp=True),
        "use etp=2",
        megatron(tp=2, sp=True, etp=2),
        model="mixtral-8x7b",
    ),
    Case(
        "experts_need_sequence_parallel",
        megatron(tp=2, etp=2),
        "use sp=true",
        megatron(tp=2, etp=2, sp=True),
        model="mixtral-8x7b",
    ),
    Case("sequence_parallel", megatron(sp=True), "sp=true with tp=1", megatron(tp=2, sp=True)),
    Case(
        "sequence_parallel",
        megatron(tp=4, sp=True),
        "use a multiple of 4",
        megatron(tp=4, sp=True),
        change={"seq_length": 4098},
        good_change={"seq_length": 4100},
    ),
    Case(
        "context_parallel",
        megatron(cp=4),
        "use a multiple of 8",
        megatron(cp=4),
        change={"seq_length": 4100},
        good_change={"seq_length": 4104},
    ),
    Case(
        "ring",
        megatron(cp=2, cp_comm_type="p2p"),
        "sliding_window=4096 of mistral-7b-v0.1",
        megatron(cp=2),
        model="mistral-7b-v0.1",
        change={"seq_length": 8192},
        good_change={"seq_length": 8192},
    ),
    Case(
        "ring",
        megatron(cp=2, cp_comm_type="p2p"),
        "no flash kernel",
        megatron(cp=2),
        change={"precision": "fp32"},
    ),
]


def settled(case: Case, good: bool) -> tuple[ModelSpec, ClusterSpec, JobSpec, Layout]:
    machines = cluster((case.good_gpus if good else None) or case.gpus)
    the_job = job(**{**case.change, **((case.good_change or {}) if good else {})})
    layout = case.good if good else case.bad
    if layout.dp == 1 or good:
        layout = filled(layout, machines.num_gpus, the_job.global_batch_size)
    return case.shape or load_model(case.model), machines, the_job, layout


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.bad.engine}")
def test_a_broken_rule_is_named_and_alone(case: Case) -> None:
    found = violations(*settled(case, good=False))
    assert [violation.rule for violation in found] == [case.rule]
    assert re.search(case.said, found[0].message), found[0].message
    assert "\n" not in found[0].message


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.bad.engine}")
def test_the_mended_layout_is_legal(case: Case) -> None:
    assert violations(*settled(case, good=True)) == ()
    assert is_legal(*settled(case, good=True))


def test_the_example_of_the_design() -> None:
    """tp=6 breaks four rules at once, and each says what it would take."""
    found = violations(*settled(Case("", megatron(tp=6), "", megatron()), good=False))
    messages = [violation.message for violation in found]
    assert any(
        "tp=6 does not divide num_attention_heads=32 of llama-3.1-8b; use 1, 2, 4, 8, 16 or 32" in m for m in messages
    )
    assert {violation.rule for violation in found} == {
        "world_size",
        "tp_divides_heads",
        "tp_fits_kv_heads",
        "tp_divides_mlp",
    }


def test_key_value_heads_may_be_fewer_than_ranks() -> None:
    """megatron-core shares them (attention.py); only a mixture of both is refused."""
    assert (
        violations(*settled(Case("", megatron(tp=8), "", megatron(), model="llama-3-70b", gpus="16xH100"), good=False))
        == ()
    )
    shared = Case("", megatron(tp=4), "", megatron(), model="qwen2.5-3b")  # two key/value heads, sixteen query heads
    assert violations(*settled(shared, good=False)) == ()


def test_kv_heads_and_mlp_that_tp_does_not_fit() -> None:
    odd = dataclasses.replace(load_model(LLAMA), num_attention_heads=24, num_key_value_heads=3, ffn_hidden_size=14338)
    found = violations(odd, cluster("8xH100"), job(), megatron(tp=4, dp=2, gradient_accumulation_steps=64))
    assert [violation.rule for violation in found] == ["tp_fits_kv_heads", "tp_divides_mlp"]


def test_rope_kinds_that_megatron_does_not_compute() -> None:
    yarn = dataclasses.replace(load_model(LLAMA), rope_scaling={"rope_type": "yarn", "factor": 4.0})
    rest = (cluster("8xH100"), job())
    assert [v.rule for v in violations(yarn, *rest, filled(megatron(), 8, 128))] == ["megatron_rope"]
    assert violations(yarn, *rest, filled(deepspeed(zero_stage=3), 8, 128)) == ()


def test_rope_models_may_run_longer_than_they_were_made_for() -> None:
    found = violations(
        *settled(
            Case("", deepspeed(zero_stage=3), "", deepspeed(), model="llama-2-7b", change={"seq_length": 8192}),
            good=False,
        )
    )
    assert found == ()


def test_every_rule_has_a_case() -> None:
    covered = {case.rule for case in CASES} | {"tp_fits_kv_heads", "tp_divides_mlp", "megatron_rope"}
    assert {rule.name for rule in RULES} == covered


@pytest.mark.parametrize("number", [1, 2, 12, 49, 97, 1024])
def test_divisors(number: int) -> None:
    assert divisors(number) == [i for i in range(1, number + 1) if number % i == 0]
