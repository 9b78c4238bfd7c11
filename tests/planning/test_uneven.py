"""What does not divide, is narrower, or lies across nodes: counts by hand beside the cost model's."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from kit.cost.memory.activations_megatron import layer_terms
from kit.cost.memory.deepspeed_sizes import largest_parameter, least_param_buffer
from kit.cost.memory.engine import engine_memory
from kit.cost.memory.rank_megatron import layer_saved, saved_activations
from kit.cost.model.flops import layer_attention_flops_per_token
from kit.cost.model.params import RankParameters
from kit.cost.model.pipeline import chunk_layers, in_flight
from kit.cost.time.data_parallel import data_parallel_s
from kit.cost.time.gpu import gpu_perf
from kit.cost.time.step import Part, step_time_components_s
from kit.cost.workload import Workload
from kit.planner.rules import violations
from kit.specs.catalog import load_model
from tests.support.models import cluster, deepspeed, job, megatron, torch


def test_a_rank_keeps_a_whole_key_and_value_head_where_there_are_fewer_heads_than_ranks() -> None:
    """Two heads on four ranks: each has one, as with four heads."""
    model = load_model("llama-3.1-8b")

    def terms(heads: int) -> dict[str, float]:
        few = replace(model, num_key_value_heads=heads)
        return layer_terms(Workload(few, cluster("4xH100"), job(), megatron(tp=4, sp=True)), False)

    assert terms(2) == terms(4)
    assert terms(8)["attention"] > terms(4)["attention"]


def test_scores_are_as_wide_as_queries_and_their_product_as_values() -> None:
    """DeepSeek-V3: 192 for the scores and 128 for the values, of 128 heads; half of 4,096 tokens are seen."""
    model = load_model("deepseek-v3")
    assert layer_attention_flops_per_token(model, 4096) == 2 * 2048 * 128 * (192 + 128)
    assert model.latent is not None
    wider = replace(model, latent=replace(model.latent, value_head_dim=256))
    assert layer_attention_flops_per_token(wider, 4096) == 2 * 2048 * 128 * (192 + 256)


def test_an_uneven_last_stage_lacks_the_layer_beside_the_loss_and_others_beside_the_embedding() -> None:
    layout = megatron(pp=4, vp=2, first_stage_layers=3, last_stage_layers=3)
    chunks = chunk_layers(14, layout)
    sizes = [len(chunk) for chunk in chunks]
    assert sizes == [1, 2, 2, 2, 2, 2, 2, 1]
    assert [layer for chunk in chunks for layer in chunk] == list(range(14))


def test_gradients_of_experts_are_reduced_over_the_nodes_that_hold_their_copies() -> None:
    """Eight groups of experts on the eight GPUs of a node: the copies are on the other node, over its slower link."""
    model, nodes = load_model("mixtral-8x7b"), cluster("16xH100")
    layout = megatron(dp=16, ep=8, zero_stage=1)
    experts = RankParameters(dense_matrices=0.0, vectors=0.0, vocabulary=0.0, experts=1e9)

    def seconds(inside: float, between: float) -> float:
        links = replace(nodes, intra_node_gbytes_per_s=inside, inter_node_gbytes_per_s=between)
        workload = Workload(model, links, job(global_batch_size=64), layout)
        return data_parallel_s(gpu_perf(links, "bf16"), workload, experts, 0.0, 0.0)

    assert seconds(900.0, 50.0) == pytest.approx(seconds(450.0, 50.0))
    assert seconds(450.0, 25.0) > 1.5 * seconds(450.0, 50.0)


@pytest.mark.parametrize("ranks", [3, 7, 24])
def test_the_parts_of_all_ranks_hold_the_largest_weight(ranks: int) -> None:
    for name in ("llama-3.1-8b", "gpt2", "mixtral-8x7b"):
        model = load_model(name)
        part = least_param_buffer(model, deepspeed(zero_stage=3, dp=ranks))
        assert part * ranks >= largest_parameter(model) > (part - 1) * ranks


def test_only_interleaved_stages_keep_what_they_have_sent() -> None:
    """megatron-core frees a stage's output once it is sent, but not where chunks interleave."""
    model, machine = load_model("llama-3.1-8b"), cluster("8xH100")

    def beside_layers(vp: int) -> float:
        layout = megatron(pp=2, vp=vp, dp=4, gradient_accumulation_steps=8)
        workload = Workload(model, machine, job(global_batch_size=32), layout)
        chunks = in_flight(2, vp, 8, 0)
        layers = 16 // vp * layer_saved(workload, False)
        return saved_activations(workload, 0) / sum(chunks) - layers

    assert beside_layers(1) == 0
    assert beside_layers(2) == 2 * 4096 * model.hidden_size


def test_small_buckets_cost_latency_at_each_reduction_and_stage_1_reduces_once_a_step() -> None:
    model, machine = load_model("llama-3.1-8b"), cluster("8xH100")

    def extra_s(stage: int, micro_batches: int) -> float:
        layout = deepspeed(zero_stage=stage, dp=8, gradient_accumulation_steps=micro_batches)
        small, large = (
            step_time_components_s(Workload(model, machine, job(), replace(layout, reduce_bucket_size=size)))
            for size in (10**6, 10**9)
        )
        return small["data_parallel"] - large["data_parallel"]

    assert extra_s(1, 4) == pytest.approx(extra_s(1, 1))
    assert extra_s(1, 1) > 0
    assert extra_s(2, 4) == pytest.approx(4 * extra_s(2, 1))


def test_what_a_refusal_offers_is_allowed() -> None:
    """Twelve heads over six of keys: four ranks would hold one and a half of them."""
    heads: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 128, "hidden_size": 1536}
    model = replace(load_model("llama-3.1-8b"), **heads)
    refused = Workload(
        model, cluster("8xH100"), job(seq_length=4096), deepspeed(cp=8, cp_comm_type="a2a", zero_stage=3)
    )
    (message,) = (each.message for each in violations(refused) if each.rule == "ulysses_divides_heads")
    offered = [int(size) for size in re.findall(r"\d+", message.partition("; use ")[2])]
    assert offered == [1, 2]
    for cp in offered:
        fine = replace(refused, layout=replace(refused.layout, cp=cp, dp=8 // cp))
        assert not [each for each in violations(fine) if each.rule.startswith("ulysses")]


def test_flags_that_no_engine_takes_together_are_to_be_left_out() -> None:
    """Virtual stages are Megatron's, compiled blocks are not: no engine is offered for both."""
    layout = deepspeed(dp=8, zero_stage=2, vp=2, zero_quantized_weights=True, compile_layers=True)
    both = Workload(load_model("llama-3.1-8b"), cluster("8xH100"), job(), replace(layout, engine="megatron"))
    (message,) = (each.message for each in violations(both) if each.rule == "flag_of_engine")
    assert "zero_quantized_weights" in message
    alone = replace(both, layout=replace(both.layout, engine="torch", implementation="huggingface"))
    (message,) = (each.message for each in violations(alone) if each.rule == "flag_of_engine")
    assert message.endswith("; leave them out")


def test_each_token_keeps_a_copy_and_a_result_for_each_of_its_experts() -> None:
    """Mixtral: 2 of 8 experts, each 14,336 wide, gated: a copy of the token, gate and up, and products of both."""
    model = load_model("mixtral-8x7b")
    workload = Workload(model, cluster("8xH100"), job(), megatron(dp=8, ep=8))
    experts = layer_terms(workload, True)["experts"]
    assert experts == 2 * 2 * (4096 + 6 * 14336) * 4096
    more = replace(workload, model=replace(model, experts_per_token=4))
    assert layer_terms(more, True)["experts"] == 2 * experts


def test_a_part_of_a_stage_takes_all_of_its_seconds() -> None:
    part = Part(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    assert part.total == 127.0


def test_autocast_keeps_16_bits_of_every_matrix_and_under_recompute_of_the_head_alone() -> None:
    model, machine = load_model("llama-3.2-1b"), cluster("8xH100")
    matrices = model.num_layers * (2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192)
    head = 2048 * 128256

    def copies(**changes: object) -> tuple[float, float]:
        return engine_memory(Workload(model, machine, job(), torch(dp=8, **changes))).autocast_copies

    assert copies(zero_stage=3) == (0.0, 0.0)  # FSDP2 casts what it gathers
    assert copies() == (2 * (matrices + head), 2 * (matrices + head))
    assert copies(recompute="full") == (2 * (matrices + head), 2 * head)
