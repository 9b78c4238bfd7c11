"""Weight maps: complete, exact in both directions, and laid out as megatron-core reads them."""

from __future__ import annotations

import pytest
import torch

from kit.engines.hf import parameter_shapes
from kit.engines.megatron.rope import inverse_frequencies
from kit.engines.megatron.weights import tensor_groups, weight_map
from kit.engines.megatron.weights.random import RandomSource
from kit.engines.megatron.weights.rules import GatedRows, GroupedQkv, Vocabulary
from kit.errors import EngineError
from kit.planner.megatron_rules import MEGATRON_FAMILIES as FAMILIES
from tests.training import tiny


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_split_and_join_are_inverse(family, tied, tp):
    head_dim = 8 if family in ("phi3", "gpt2", "mixtral", "qwen3_moe") else 16  # theirs split the hidden size
    spec = tiny.model(family, vocab_size=127, tied_embeddings=tied, head_dim=head_dim)
    shapes = parameter_shapes(spec)
    source = RandomSource(shapes, seed=5)
    seen = []
    for group in tensor_groups(weight_map(spec), spec):
        tensors = [torch.rand(shapes[name]) if "norm" in name else source.read(name) for name in group.hugging_face]
        shards = group.rule.split(tensors, spec, tp)
        assert len(shards) == tp
        assert len({shard.shape for shard in shards}) == 1
        joined = group.rule.join(shards, spec)
        assert all(torch.equal(a, b) for a, b in zip(joined, tensors, strict=True))
        seen += group.hugging_face
    assert sorted(seen) == sorted(shapes)


def test_qkv_is_interleaved_per_key_value_head():
    spec = tiny.model(num_attention_heads=4, num_key_value_heads=2, head_dim=2)
    query = torch.arange(8.0).reshape(8, 1)
    key, value = torch.arange(10.0, 14).reshape(4, 1), torch.arange(20.0, 24).reshape(4, 1)
    shards = GroupedQkv().split([query, key, value], spec, 2)
    assert shards[0].flatten().tolist() == [0, 1, 2, 3, 10, 11, 20, 21]
    assert shards[1].flatten().tolist() == [4, 5, 6, 7, 12, 13, 22, 23]


def test_gate_and_up_are_sliced_before_they_are_stacked():
    spec = tiny.model()
    gate, up = torch.arange(4.0).reshape(4, 1), torch.arange(10.0, 14).reshape(4, 1)
    shards = GatedRows().split([gate, up], spec, 2)
    assert [shard.flatten().tolist() for shard in shards] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_padding_rows_are_zero_and_do_not_come_back():
    spec = tiny.model(vocab_size=3)
    shards = Vocabulary().split([torch.ones(3, 2)], spec, 2)
    assert shards[1].tolist() == [[1, 1], [0, 0]]
    assert Vocabulary().join(shards, spec)[0].shape == (3, 2)


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
    exponents = torch.arange(0, 64, 2) / 64
    torch.testing.assert_close(plain, 500000.0**-exponents)
    # Llama 3.2's factors: short wavelengths stay, long ones are stretched 32 times.
    torch.testing.assert_close(scaled[0], plain[0])
    torch.testing.assert_close(scaled[-1], plain[-1] / 32)
    with pytest.raises(EngineError, match="rope_type=yarn"):
        inverse_frequencies(tiny.model(rope_scaling={"rope_type": "yarn", "factor": 4.0}))
