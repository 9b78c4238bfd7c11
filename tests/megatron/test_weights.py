"""Weight maps: complete, exact in both directions, and laid out as megatron-core reads them."""

from __future__ import annotations

import dataclasses
import math
from itertools import combinations, product

import pytest
import torch

from kit.addons.importers.megatron.source import shard_shape
from kit.engines.huggingface.models import build_skeleton, tensor_shapes
from kit.engines.megatron.model.rope import inverse_frequencies, rotation_factor, score_factor
from kit.engines.megatron.weights import mapped_params, weight_map
from kit.engines.megatron.weights.sharding import (
    QKV,
    ColumnParallel,
    Replicated,
    ShardSlice,
    VocabParallel,
    parts,
    read_parts,
)
from kit.errors import EngineError
from kit.specs.families import FAMILIES as TRAITS
from kit.specs.families import families_where
from tests.megatron.shapes import BY_FAMILY, LONGROPE, TWO_ROTATIONS, YARN
from tests.support import tiny
from tests.support.checkpoints import InMemory
from tests.support.refusals import refusal


def shards_of(sharding, tensors, spec, tp):
    """Every rank's shard, put together as the engine does it; what no piece fills is 0."""
    shapes, found = [tuple(tensor.shape) for tensor in tensors], []
    longest = max(piece.at + piece.length for rank in range(tp) for piece in sharding.slices(shapes, spec, tp, rank))
    for slices in (sharding.slices(shapes, spec, tp, rank) for rank in range(tp)):
        shape = list(shapes[0][::-1] if slices[0].transposed else shapes[0])
        shape[slices[0].dim] = longest
        found.append(torch.zeros(shape))
        for piece in slices:
            block = tensors[piece.tensor].narrow(piece.disk_dim, piece.start, piece.length)
            found[-1].narrow(piece.dim, piece.at, piece.length).copy_(block.t() if piece.transposed else block)
    return found


LATENT = dataclasses.replace(tiny.model("deepseek_v3").latent, q_lora_rank=None)
WITHOUT = {
    "deepseek without shared experts": ("deepseek_v3", {"num_shared_experts": 0}),
    "deepseek without a compressed query": ("deepseek_v3", {"latent": LATENT}),
    "glm without biases and norms of heads": ("glm4_moe", {"biases": None, "qk_norm": None}),
}
FAMILIES = {family: (family, {}) for family in families_where("megatron")} | WITHOUT


def specs(family, tied):
    family, without = FAMILIES[family]
    fixed = TRAITS[family].even_heads or family in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2")
    own = (
        BY_FAMILY.get(family, {}) | without | ({} if fixed else {"head_dim": 16})
    )  # which does not split the hidden size
    return tiny.model(family, vocab_size=127, tied_embeddings=tied, **own)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_element_is_on_one_rank_and_replicated_ones_are_on_all(family, tied, tp):
    spec = specs(family, tied)
    shapes, seen = tensor_shapes(spec), []
    for group in mapped_params(weight_map(spec), spec):
        of_group = [tuple(shapes[name]) for name in group.hugging_face]
        counts, tensors = [torch.zeros(shape) for shape in of_group], [torch.rand(shape) for shape in of_group]
        for rank in range(tp):
            for piece in group.sharding.slices(of_group, spec, tp, rank):
                counts[piece.tensor].narrow(piece.disk_dim, piece.start, piece.length).add_(1)
        expected = tp if isinstance(group.sharding, Replicated) else 1
        assert all(bool((count == expected).all()) for count in counts), group.megatron
        (whole,) = shards_of(group.sharding, tensors, spec, 1)
        assert shard_shape(group.sharding, of_group, spec) == tuple(whole.shape)
        seen += group.hugging_face
    assert sorted(seen) == sorted(shapes)


def test_qkv_is_interleaved_per_key_value_head():
    spec = tiny.model(num_attention_heads=4, num_key_value_heads=2, head_dim=2)
    query = torch.arange(8.0).reshape(8, 1)
    key, value = torch.arange(10.0, 14).reshape(4, 1), torch.arange(20.0, 24).reshape(4, 1)
    shards = shards_of(QKV(), [query, key, value], spec, 2)
    assert shards[0].flatten().tolist() == [0, 1, 2, 3, 10, 11, 20, 21]
    assert shards[1].flatten().tolist() == [4, 5, 6, 7, 12, 13, 22, 23]
    cut = shards_of(QKV(), [query, key, value], spec, 4)  # fewer key/value heads than ranks
    assert (cut[0].flatten().tolist(), cut[1].flatten().tolist()) == ([0, 1, 2, 3], [10, 11, 20, 21])


def test_gate_and_up_are_sliced_before_they_are_stacked():
    spec = tiny.model()
    gate, up = torch.arange(4.0).reshape(4, 1), torch.arange(10.0, 14).reshape(4, 1)
    shards = shards_of(ColumnParallel(), [gate, up], spec, 2)
    assert [shard.flatten().tolist() for shard in shards] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_a_range_that_cuts_rows_in_two_is_read_from_every_slice():
    """A rank of the distributed optimizer holds any range of the flattened parameter: here each one of 7 rows of 5."""
    whole = torch.arange(35.0).view(7, 5)
    cases = {
        InMemory({"a": whole[:, :2], "b": whole[:, 2:]}): [
            ShardSlice(dim=1, at=0, start=0, length=2),
            ShardSlice(dim=1, at=2, start=0, length=3, tensor=1),
        ],
        InMemory({"a": torch.cat([torch.zeros(1, 5), whole[:3]]), "b": whole[3:].t()}): [
            ShardSlice(dim=0, at=0, start=1, length=3),
            ShardSlice(dim=0, at=3, start=0, length=4, tensor=1, transposed=True),
        ],
    }
    for (start, end), (source, slices) in product(combinations(range(36), 2), cases.items()):
        held = torch.full((end - start,), -1.0)
        read_parts(source, ["a", "b"], parts(start, held, (7, 5), slices))
        assert torch.equal(held, whole.flatten()[start:end]), (start, end)


def test_padding_rows_of_the_vocabulary_are_nobodys():
    spec = tiny.model(vocab_size=3)
    assert [piece.length for piece in VocabParallel().slices([(3, 2)], spec, 2, 1)] == [1]
    assert [piece.length for piece in VocabParallel().slices([(5, 2)], spec, 4, 3)] == [0]


def test_rope_frequencies_are_those_of_transformers():
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = inverse_frequencies(tiny.model(head_dim=64, rope_theta=500000.0))
    scaled = inverse_frequencies(tiny.model(head_dim=64, rope_theta=500000.0, rope_scaling=scaling))
    torch.testing.assert_close(plain, 500000.0 ** -(torch.arange(0, 64, 2) / 64))
    # Llama 3.2's factors: short wavelengths stay, long ones are stretched 32 times.
    torch.testing.assert_close(scaled[0], plain[0])
    torch.testing.assert_close(scaled[-1], plain[-1] / 32)


def test_longrope_has_frequencies_for_long_sequences():
    spec = tiny.model("phi3", rope_scaling=LONGROPE)
    short, long = inverse_frequencies(spec), inverse_frequencies(spec, long=True)
    torch.testing.assert_close(short * torch.tensor(LONGROPE["short_factor"]), 10_000.0 ** -(torch.arange(4) / 4))
    torch.testing.assert_close(long * torch.tensor(LONGROPE["long_factor"]), 10_000.0 ** -(torch.arange(4) / 4))
    assert rotation_factor(spec) == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))  # 64 positions of 16
    unsaid = {key: value for key, value in LONGROPE.items() if key != "original_max_position_embeddings"}
    torch.testing.assert_close(inverse_frequencies(tiny.model("phi3", rope_scaling=unsaid), long=True), long)


def test_layers_with_a_window_are_not_stretched():
    """Gemma 3: their base is their own, and the scaling is that of the others."""
    plain, stretched = (
        tiny.model("gemma3_text", **TWO_ROTATIONS, **scaling)
        for scaling in ({}, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    )
    torch.testing.assert_close(inverse_frequencies(stretched), inverse_frequencies(plain) / 8)
    torch.testing.assert_close(inverse_frequencies(stretched, local=True), 100.0 ** -(torch.arange(4) / 4))


def test_latent_attention_is_scaled_as_in_transformers_where_positions_are_stretched():
    spec = tiny.model("deepseek_v3", rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0})
    theirs = build_skeleton(spec).model.layers[0].self_attn.scaling
    assert score_factor(spec) * spec.latent.query_head_dim**-0.5 == pytest.approx(theirs)
    assert score_factor(spec) > 1.2


def test_yarn_multiplies_whole_heads_only():
    assert rotation_factor(tiny.model(rope_scaling=YARN)) == pytest.approx(1 + 0.1 * math.log(4))
    assert rotation_factor(tiny.model()) == 1
    assert "rope_type=yarn" in refusal(
        EngineError, rotation_factor, tiny.model("gpt_neox", rope_scaling=YARN, partial_rotary_factor=0.5)
    )
