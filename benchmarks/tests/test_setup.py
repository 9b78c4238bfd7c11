"""Memory of runs described in detail: counts, pipelines and saved tensors against what can be counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.accuracy.fsdp_rows import with_fsdp
from benchmarks.accuracy.programs.megatron import _chunk_bytes
from benchmarks.accuracy.programs.memory import memory_of, moments_of
from benchmarks.accuracy.programs.published import PublishedModel, PublishedWorkload
from kit.cost.memory.parts import RankParts
from kit.cost.memory.rank_megatron import layer_terms, saved_activations, saved_terms
from kit.cost.memory.states import StateBytes
from kit.specs.layout import Layout
from tests.support.models import cluster, job

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


OWN = {"recompute_modules"}
"""Fields of a published run that a layout has too."""


def run(model: PublishedModel = GPT, **changes: Any) -> PublishedWorkload:
    sizes = {name: changes.pop(name) for name in list(changes) if hasattr(LAYOUT, name) and name not in OWN}
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
    """34·sbh + 5·as²b (arXiv 2205.05198, equation 1): masks as they are, inputs of linears once, and 8 bytes
    of statistics of each norm."""
    workload = run(attention="unfused")
    tokens, h, s, a = 4096, 512, 1024, 8
    assert sum(layer_terms(workload, False).values()) == 34 * tokens * h + 5 * a * s * tokens + 2 * 8 * tokens


@pytest.mark.parametrize(
    ("stage", "reserved", "micro_batches", "there"),
    [(0, True, 1, 0.0), (3, True, 1, 4 / 8), (3, False, 1, 0.0), (0, False, 3, 4.0), (3, False, 3, 4 / 8)],
)
def test_gradients_that_forward_finds(stage: int, reserved: bool, micro_batches: int, there: float) -> None:
    """Of one micro batch none, but what the allocator reserved for FSDP's reductions on a stream of their own."""
    asked = run(dp=8, zero_stage=stage, gradient_accumulation_steps=micro_batches, reserved=reserved)
    engine = with_fsdp({}, replace(asked, implementation="huggingface")).engine
    assert engine is not None
    assert engine.dense.gradients_in_forward == there


def test_uneven_stages() -> None:
    workload = run(pp=2, stated_chunks=((0, 1, 2), (3, 4, 5, 6, 7)))
    layers, final_norm = 5 * sum(layer_terms(workload, False).values()), 4 * 512 * 4096
    assert saved_activations(workload, 1) == layers + final_norm


def test_recompute_keeps_less_in_this_order() -> None:
    """full with all layers < block of some < none; uniform over two layers halves the inputs."""
    full: dict[str, Any] = {"recompute": "full"}
    ways: tuple[dict[str, Any], ...] = (full | {"recompute_every": 2}, full, full | {"recompute_layers": 4}, {})
    peaks = [saved_activations(run(**way), 0, _chunk_bytes) for way in ways]  # type: ignore[arg-type]
    assert peaks == sorted({*peaks})


def test_selective_recompute_drops_the_named_modules_alone() -> None:
    workload = run(attention="unfused", recompute="selective", recompute_modules=frozenset({"core_attn"}))
    assert set(layer_terms(workload, False)) - set(saved_terms(workload, False)) == {"core_attn"}


def test_experts_are_sharded_by_their_own_groups() -> None:
    """Without expert parallelism 8 experts are replicated over 4 ranks; with ep=4 each rank holds 2, on one replica."""
    model = replace(GPT, num_experts=8, experts_per_token=2, moe_ffn_hidden_size=1024)
    whole = run(model, dp=4).parameters[0].experts
    workload = run(model, dp=4, ep=4, zero_stage=1)
    (parameters,) = workload.parameters
    assert parameters.experts == whole / 4
    assert memory_of(workload, 0).end_of_step["optimizer"] == pytest.approx(
        12 * (parameters.dense / 4 + parameters.experts)
    )


@pytest.mark.parametrize(
    ("between", "saved", "first"), [(32.0, 1024.0, 3.5 + 4 + 1024 - 128), (1024.0, 0.0, 3.5 + 1024)]
)
def test_the_first_step_is_the_fuller_of_before_and_between_steps(between: float, saved: float, first: float) -> None:
    """Weights 1, optimizer 2, of which 128 come late; gradients in forward 4, buffers 0.5."""
    states = StateBytes(1.0, 2.0, 4.0, 8.0, 16.0, between, 64.0)
    parts = RankParts(states=states, buffers=0.5, saved_activations=saved, backward_workspace=0.0, save=2.0)
    found = moments_of(parts, late=128.0)
    assert (sum(found.first_step_peak.values()), sum(found.end_of_step.values())) == (first, 3.5 + between)


def test_the_first_step_has_no_moments_yet() -> None:
    memory = memory_of(run(), 0)
    assert sum(memory.peak.values()) - sum(memory.first_step_peak.values()) == pytest.approx(
        8 * run().parameters[0].total
    )
