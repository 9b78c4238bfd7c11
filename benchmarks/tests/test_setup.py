"""Memory of runs described in detail: counts, pipelines and saved tensors against what can be counted by hand."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.accuracy.programs.megatron import _chunk_bytes
from benchmarks.accuracy.programs.memory import memory_of
from benchmarks.accuracy.programs.published import PublishedModel, PublishedWorkload
from kit.cost.memory.peak import parts_of, peak, peak_gib, peak_memory
from kit.cost.memory.rank_megatron import layer_terms, saved_activations, saved_terms
from kit.cost.model.params import rank_parameters as planned_parameters
from kit.cost.model.pipeline import in_flight
from kit.cost.workload import Workload
from kit.specs.catalog import load_model
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from tests.support.models import cluster, deepspeed, job, megatron, torch

GPT = PublishedModel(
    name="gpt",
    family="gpt2",
    num_layers=8,
    hidden_size=512,
    ffn_hidden_size=2048,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=50304,
    max_position_embeddings=1024,
    tied_embeddings=True,
    norm="layernorm",
    gated_mlp=False,
    biases="all",
    positions="learned",
)
LAYOUT = Layout(
    engine="megatron",
    implementation="transformer_engine",
    cp_comm_type="p2p",
    micro_batch_size=4,
    gradient_accumulation_steps=8,
)


def run(model: PublishedModel = GPT, **changes: Any) -> PublishedWorkload:
    sizes = {name: changes.pop(name) for name in list(changes) if name in LAYOUT.__dataclass_fields__}
    return PublishedWorkload(
        model=model,
        cluster=cluster("8xH100"),
        job=job(seq_length=1024),
        layout=replace(LAYOUT, **sizes),
        hidden_dropout=True,
        attention_dropout=True,
        gradient_accumulation_fusion=True,
        **{"attention": "cudnn", **changes},
    )


def test_a_layer_is_korthikantis_34_sbh_with_scores() -> None:
    """34·sbh + 5·as²b (arXiv 2205.05198, equation 1): masks and statistics as they are, inputs of linears once."""
    workload = run(attention="unfused")
    tokens, h, s, a = 4096, 512, 1024, 8
    statistics = 2 * 8 * tokens
    assert sum(layer_terms(workload, False).values()) == 34 * tokens * h + 5 * a * s * tokens + statistics


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_parameters_of_a_rank_are_the_planners(tied: bool, stage: int) -> None:
    """Two counts, written apart, of the same model."""
    model = ModelSpec(
        name="gpt",
        family="gpt2",
        num_layers=8,
        hidden_size=512,
        ffn_hidden_size=2048,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=50304,
        max_position_embeddings=1024,
        tied_embeddings=tied,
        rope_theta=None,
    )
    workload = run(replace(GPT, tied_embeddings=tied), tp=2, pp=4)
    assert workload.parameters[stage].total == planned_parameters(model, 2, 4, stage)


def test_chunks_of_a_stage_and_what_they_hold() -> None:
    workload = run(pp=2, vp=2, gradient_accumulation_steps=4)
    assert workload.stage_chunks(0) == ((0, 1), (4, 5))
    assert workload.stage_chunks(1) == ((2, 3), (6, 7))
    # Last stage: (v−1)·p = 2 warm-up forwards and one more, in groups of p: two of chunk 0, one of chunk 1.
    assert in_flight(2, 2, 4, 1) == (2, 1)
    assert in_flight(2, 2, 4, 0) == (3, 2)
    assert in_flight(4, 1, 8, 0) == (4,)


def test_micro_batches_that_pipeline_stages_do_not_divide_widen_the_group() -> None:
    """5 micro batches on 4 stages leave one over; groups of 4 are refused (megatron-core, get_schedule_table)."""
    assert sum(in_flight(4, 2, 5, 3)) == 6


def test_uneven_stages() -> None:
    workload = run(pp=2, stated_chunks=((0, 1, 2), (3, 4, 5, 6, 7)))
    per_layer = sum(layer_terms(workload, False).values())
    final_norm = 4 * 512 * 4096
    assert saved_activations(workload, 1) == 5 * per_layer + final_norm


def test_recompute_keeps_less_in_this_order() -> None:
    """full with all layers < block of some < none; uniform over two layers halves the inputs."""
    peaks = [
        saved_activations(workload, 0, _chunk_bytes)  # type: ignore[arg-type]
        for workload in (
            run(recompute="full", recompute_every=2),
            run(recompute="full"),
            run(recompute="full", recompute_layers=4),
            run(),
        )
    ]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[1] < peaks[2] < peaks[3]


def test_selective_recompute_drops_the_named_modules_alone() -> None:
    workload = run(attention="unfused", recompute="selective", recompute_modules=frozenset({"core_attn"}))
    whole, kept = layer_terms(workload, False), saved_terms(workload, False)
    assert set(whole) - set(kept) == {"core_attn"}


def test_experts_are_sharded_by_their_own_groups() -> None:
    """Without expert parallelism 8 experts are replicated over 4 ranks; with ep=4 each rank holds 2, on one replica."""
    model = replace(GPT, num_experts=8, experts_per_token=2, moe_ffn_hidden_size=1024, expert_layers=(True,) * 8)
    whole = run(model, dp=4).parameters[0].experts
    workload = run(model, dp=4, ep=4, zero_stage=1)
    (parameters,) = workload.parameters
    assert parameters.experts == whole / 4
    optimizer = memory_of(workload, 0).end_of_step["optimizer"]
    assert optimizer == pytest.approx(12 * (parameters.dense / 4 + parameters.experts))


def test_the_first_step_has_no_moments_yet() -> None:
    memory = memory_of(run(), 0)
    assert sum(memory.peak.values()) - sum(memory.first_step_peak.values()) == pytest.approx(
        8 * run().parameters[0].total
    )


@pytest.mark.parametrize(
    ("pp", "vp", "m", "stage", "expected"),
    [
        (1, 1, 4, 0, 1),
        (4, 1, 8, 0, 4),
        (4, 1, 8, 3, 1),
        (4, 1, 2, 0, 2),
        (4, 2, 8, 0, 2 * 3 + 1 * 4 + 1),
        (4, 2, 8, 3, 0 + 4 + 1),
        (2, 2, 1, 0, 2),
    ],
)
def test_micro_batches_in_flight(pp: int, vp: int, m: int, stage: int, expected: int) -> None:
    """Chunks of 1/v of a stage (arXiv 2104.04473, section 2.2)."""
    assert sum(in_flight(pp, vp, m, stage)) == expected


PLANS = [
    ("llama-3-70b", megatron(tp=8, pp=4, sp=True, dp=2, gradient_accumulation_steps=16)),
    ("llama-3-70b", megatron(tp=4, pp=4, vp=2, sp=True, dp=4, gradient_accumulation_steps=8, recompute="full")),
    ("mixtral-8x7b", megatron(tp=2, ep=4, sp=True, dp=32)),
    (  # the first dense layers are on stages 0 to 2, so that stage 3 is the fullest
        "glm-4.5",
        megatron(pp=32, ep=2, dp=2, first_stage_layers=1, last_stage_layers=1, gradient_accumulation_steps=128),
    ),
    ("llama-3-8b", deepspeed(zero_stage=3, dp=64, gradient_accumulation_steps=2)),
    ("qwen3-8b", torch(zero_stage=2, dp=64)),
    ("gpt2", torch(dp=64, recompute="full")),
]


@pytest.mark.parametrize(("name", "layout"), PLANS)
def test_what_a_search_compares_is_what_the_report_adds_up(name: str, layout: Layout) -> None:
    model, machines, the_job = load_model(name), cluster("8x8xH100"), job(seq_length=1024)
    stages = peak_memory(Workload(model, machines, the_job, layout))
    assert peak_gib(Workload(model, machines, the_job, layout)) == pytest.approx(
        max(stage.peak_gib for stage in stages)
    )
    for stage in stages:
        assert max(stage.phases_gib.values()) == pytest.approx(stage.peak_gib)


@pytest.mark.parametrize(("name", "layout"), PLANS)
def test_a_verdict_names_what_is_full(name: str, layout: Layout) -> None:
    report = peak(Workload(load_model(name), cluster("8x8xH100"), job(seq_length=1024), layout))
    assert (report.verdict == "does not fit") == (report.peak_gib > report.usable_gib)
    fullest = max(report.stages, key=lambda stage: stage.peak_gib).components_gib
    assert fullest[report.binding] == max(fullest.values())


def test_deepspeed_loads_its_weights_once() -> None:
    """14.77e9 weights of 2 bytes; until the vectors are flat too, the largest weight (152064 x 5120); and the clone of
    a rank's eighth, which becomes its master weights on the host. Random weights are built on one host, in fp32."""
    layout = deepspeed(zero_stage=2, dp=8, offload_optimizer="cpu", recompute="full")
    machines, shape = cluster("8xA100-40"), load_model("qwen2.5-14b")
    tuned, pretrained = (
        Workload(shape, machines, dataclasses.replace(job(seq_length=2048), objective=objective), layout)
        for objective in ("sft", "pretrain")
    )
    total = tuned.parameters[0].total
    assert parts_of(tuned, 0).load == 2 * total + 2 * 152064 * 5120 + 2 * total / 8
    report, other = peak(tuned), peak(pretrained)
    assert (report.verdict, other.peak_gib) == ("fits", report.peak_gib)
    (stage,) = report.stages
    assert stage.phases_gib["load"] < stage.phases_gib["forward"] == report.peak_gib
    assert other.host_load_gib_per_node - report.host_load_gib_per_node == pytest.approx(4 * total / 2**30)
    roomy, tight = cluster("8xA100-80"), cluster("8xA100-40")
    assert parts_of(dataclasses.replace(tuned, cluster=roomy), 0).load == parts_of(tuned, 0).load
    # TRL's trainers have each weight beside the flat copy, or make that on the host.
    trl = dataclasses.replace(tuned, job=dataclasses.replace(tuned.job, objective="dpo"), cluster=roomy)
    assert parts_of(trl, 0).load == 2 * 2 * total
    assert parts_of(dataclasses.replace(trl, cluster=tight), 0).load == parts_of(tuned, 0).load
    on_gpu = dataclasses.replace(tuned, layout=dataclasses.replace(layout, offload_optimizer="none"))
    # Master weights, and gradients of their size, which are more than the largest weight with the clone.
    assert parts_of(on_gpu, 0).load == 2 * total + 2 * 4 * total / 8


def test_host_memory_can_be_what_does_not_fit() -> None:
    machines = dataclasses.replace(cluster("8xH100"), host_ram_gib=64.0)
    offloaded = deepspeed(zero_stage=3, dp=8, offload_optimizer="cpu")
    report = peak(Workload(load_model("llama-3-8b"), machines, job(), offloaded))
    assert (report.verdict, report.binding) == ("does not fit", "host memory")
    assert report.host_load_gib_per_node > report.host_ram_gib_per_node
