"""Random but reproducible shapes, clusters and jobs."""

from __future__ import annotations

import random

from kit.specs.catalog import parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import WITH_EXPERTS, Family, ModelSpec

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "mixtral", "qwen3_moe")
TWO_STACKS: tuple[Family, ...] = ("t5", "bart", "blenderbot")


def random_model(rng: random.Random, family: Family) -> ModelSpec:
    """A small shape with nothing round about it."""
    key_value_heads = rng.randint(1, 4)
    heads = key_value_heads * rng.randint(1, 4) if family != "gpt2" else rng.randint(1, 8)
    head_dim = 2 * rng.randint(2, 12)
    own_width = family not in ("phi3", "gpt2")
    width = rng.randint(8, 300)
    experts = {}
    if family in WITH_EXPERTS:
        number = rng.randint(2, 9)
        experts = {
            "num_experts": number,
            "experts_per_token": rng.randint(1, number),
            "moe_ffn_hidden_size": width if family == "mixtral" else rng.randint(8, 300),
        }
    return ModelSpec(
        **experts,
        name=f"random-{family}",
        family=family,
        num_layers=rng.randint(1, 5),
        # transformers wants a multiple of the heads, whatever head_dim is.
        hidden_size=heads * rng.randint(4, 40) if own_width else heads * head_dim,
        ffn_hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=heads if family == "gpt2" else key_value_heads,
        head_dim=head_dim,
        vocab_size=rng.randint(10, 500),
        max_position_embeddings=rng.randint(16, 200),
        tied_embeddings=rng.random() < 0.5,
        rope_theta=None if family == "gpt2" else 10000.0,
    )


def random_encoder_decoder(rng: random.Random, family: Family) -> ModelSpec:
    """The same with two stacks."""
    heads, head_dim = rng.randint(1, 6), 2 * rng.randint(2, 12)
    own = {}
    if family == "t5":
        own = {
            "relative_attention_buckets": 2 * rng.randint(2, 20),
            "feed_forward_proj": rng.choice(["relu", "gated-gelu"]),
            "tied_embeddings": rng.random() < 0.5,
        }
    return ModelSpec(
        **{"tied_embeddings": True, **own},
        name=f"random-{family}",
        family=family,
        num_layers=rng.randint(1, 5),
        encoder_layers=rng.randint(1, 5),
        hidden_size=heads * head_dim if family != "t5" else rng.randint(8, 90),
        ffn_hidden_size=rng.randint(8, 300),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        vocab_size=rng.randint(10, 500),
        max_position_embeddings=rng.randint(16, 200),
        norm_eps=1e-6 if family == "t5" else 1e-5,
        rope_theta=None,
        scale_embedding=family != "t5" and rng.random() < 0.5,
    )


def job(**changes: object) -> JobSpec:
    """A job of 128 sequences of 4,096 tokens."""
    return JobSpec(**{"seq_length": 4096, "global_batch_size": 128, **changes})  # type: ignore[arg-type]


def megatron(**sizes: object) -> Layout:
    """A Megatron layout with the distributed optimizer."""
    return Layout(engine="megatron", implementation="torch-native", **{"zero_stage": 1, **sizes})  # type: ignore[arg-type]


def deepspeed(**sizes: object) -> Layout:
    """A DeepSpeed layout."""
    return Layout(engine="deepspeed", implementation="huggingface-sdpa", **sizes)  # type: ignore[arg-type]


def torch(**sizes: object) -> Layout:
    """A layout of the torch engine."""
    return Layout(engine="torch", implementation="huggingface-sdpa", **sizes)  # type: ignore[arg-type]


def cluster(text: str) -> ClusterSpec:
    """A cluster of the catalog."""
    return parse_cluster(text)
