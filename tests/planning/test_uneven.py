"""What does not divide, is narrower, or lies across nodes: counts by hand beside the cost model's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kit.cost.memory.activations_megatron import layer_terms
from kit.cost.memory.deepspeed_sizes import largest_parameter, least_param_buffer
from kit.cost.model.flops import layer_attention_flops_per_token
from kit.cost.model.params import RankParameters
from kit.cost.model.pipeline import chunk_layers
from kit.cost.time.data_parallel import data_parallel_s
from kit.cost.time.gpu import gpu_perf
from kit.cost.workload import Workload
from kit.specs.catalog import load_model
from tests.planning.examples import cluster, deepspeed, job, megatron


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
