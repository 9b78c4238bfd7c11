"""Random but reproducible shapes, clusters and jobs."""

from __future__ import annotations

import random
from typing import Any

from kit.specs.catalog import parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.families import FAMILIES as family_traits
from kit.specs.families import Family, families_with
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import LatentAttention, ModelSpec

TWO_STACKS: tuple[Family, ...] = ("t5", "bart", "blenderbot")
FAMILIES: tuple[Family, ...] = tuple(family for family in family_traits if family not in TWO_STACKS)


def random_model(rng: random.Random, family: Family) -> ModelSpec:
    """A small shape with nothing round about it; what a family may have, it sometimes has."""
    traits = family_traits[family]
    head_dim, groups = 2 * rng.randint(2, 12), rng.randint(1, 4)
    heads = groups * rng.randint(1, 4)
    own = _own(rng, family, groups, heads)
    layers = rng.randint(1, 4)
    if "full_attention_every" in traits.takes:
        own |= {"sliding_window": rng.randint(4, 90), "full_attention_every": rng.randint(2, max(2, layers))}
        own["full_attention_every"] = min(own["full_attention_every"], layers) if layers > 1 else 0
    latent = own.get("latent")
    width = rng.randint(8, 300)
    # transformers wants a multiple of the heads, whatever head_dim is.
    hidden = heads * head_dim if traits.even_heads else heads * rng.randint(4, 40)
    if family in ("bloom",):
        width = 4 * hidden
    fields = {
        "num_key_value_heads": groups if traits.grouped_queries and not latent else heads,
        "head_dim": latent.query_head_dim if latent else head_dim,
        "rope_theta": 10000.0 if traits.positions == "rope" else None,
        "max_position_embeddings": rng.randint(16, 200),
        "moe_ffn_hidden_size": 0
        if family not in families_with("num_experts")
        else width
        if family in ("mixtral", "gpt_oss", "minimax_m2")
        else rng.randint(8, 300),
    }
    return ModelSpec(
        **{**fields, **own},
        name=f"random-{family}",
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=width,
        num_attention_heads=heads,
        vocab_size=rng.randint(10, 500),
        tied_embeddings=rng.random() < 0.5,
    )


def _own(rng: random.Random, family: Family, groups: int, heads: int) -> dict[str, Any]:
    """Optional fields of the family, at random."""
    takes = (*family_traits[family].takes, *family_traits[family].needs, *family_traits[family].choices)
    number, parallel = 2 * rng.randint(2, 5), rng.random() < 0.7
    beta = {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
    attention, logits = rng.choice([(None, None), (50.0, None), (20.0, 30.0)])
    found = {
        "num_experts": {"num_experts": number, "experts_per_token": rng.randint(1, number)},
        "sliding_window": {"sliding_window": rng.choice([None, rng.randint(4, 90)])},
        "norm_topk_prob": {"norm_topk_prob": rng.random() < 0.5},
        "partial_rotary_factor": {"partial_rotary_factor": rng.choice([0.5, 1.0])},
        "query_pre_attn_scalar": {"query_pre_attn_scalar": rng.randint(8, 300)},
        "attention_softcap": {"attention_softcap": attention, "logit_softcap": logits},
        "residual_multiplier": {
            "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_divisor": rng.choice([1.0, 8.0])
        },
        "no_rope_every": {"no_rope_every": rng.randint(0, 1)},
        "qk_norm": {"qk_norm": rng.choice([None, "head"]), "biases": rng.choice([None, "qkv"])},
        "local_rope_theta": {"local_rope_theta": 5000.0},
        "latent": {"latent": LatentAttention(
            kv_lora_rank=rng.randint(4, 60), nope_head_dim=rng.randint(2, 20), rope_head_dim=2 * rng.randint(1, 8),
            value_head_dim=rng.randint(2, 20), q_lora_rank=rng.choice([None, rng.randint(4, 60)]))},
        "num_shared_experts": {"num_shared_experts": rng.randint(1, 3)},
        "first_dense_layers": {"first_dense_layers": rng.randint(0, 3), "routed_scaling_factor": 1.5,
                               "router_groups": 2, "router_top_groups": rng.randint(1, 2)},
        "parallel_residual": {"parallel_residual": parallel},
    }  # fmt: skip
    own = {name: value for field, values in found.items() if field in takes for name, value in values.items()}
    if family == "ministral3":
        own["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0} | beta
    if family == "falcon":
        own |= {"biases": rng.choice([None, "all"]), "positions": rng.choice([None, "alibi"])}
        own |= {"rope_theta": None if own["positions"] else 10000.0, "shared_norm": parallel and rng.random() < 0.5}
        own |= {} if parallel else {"num_key_value_heads": rng.choice([1, heads])}
    return own


def random_encoder_decoder(rng: random.Random, family: Family) -> ModelSpec:
    """A random model with an encoder and a decoder."""
    heads, head_dim, t5 = rng.randint(1, 6), 2 * rng.randint(2, 12), family == "t5"
    own = {
        "relative_attention_buckets": 2 * rng.randint(2, 20), "feed_forward_proj": rng.choice(["relu", "gated-gelu"]),
        "tied_embeddings": rng.random() < 0.5,
    }  # fmt: skip
    return ModelSpec(
        **{"tied_embeddings": True, **(own if t5 else {})},
        name=f"random-{family}",
        family=family,
        num_layers=rng.randint(1, 5),
        encoder_layers=rng.randint(1, 5),
        hidden_size=rng.randint(8, 90) if t5 else heads * head_dim,
        ffn_hidden_size=rng.randint(8, 300),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        vocab_size=rng.randint(10, 500),
        max_position_embeddings=rng.randint(16, 200),
        norm_eps=1e-6 if t5 else 1e-5,
        rope_theta=None,
        scale_embedding=not t5 and rng.random() < 0.5,
    )


def job(**changes: object) -> JobSpec:
    """A job of 128 sequences of 4,096 tokens."""
    return JobSpec(**{"seq_length": 4096, "global_batch_size": 128, **changes})  # type: ignore[arg-type]


def megatron(**sizes: object) -> Layout:
    """A Megatron layout with the distributed optimizer."""
    return Layout(engine="megatron", **{"implementation": "local", "zero_stage": 1, **sizes})  # type: ignore[arg-type]


def deepspeed(**sizes: object) -> Layout:
    """A DeepSpeed layout."""
    return Layout(engine="deepspeed", implementation="huggingface", **sizes)  # type: ignore[arg-type]


def torch(**sizes: object) -> Layout:
    """A layout of the torch engine."""
    return Layout(engine="torch", implementation="huggingface", **sizes)  # type: ignore[arg-type]


def cluster(text: str) -> ClusterSpec:
    """A cluster of the catalog."""
    return parse_cluster(text)
