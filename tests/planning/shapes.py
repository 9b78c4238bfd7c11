"""Small shapes of which no two sizes are alike, and workloads of them, for values that are derived by hand."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kit.cost.workload import Workload
from kit.specs.cluster import ClusterSpec
from kit.specs.layout import Layout
from kit.specs.model import Approximation, LatentAttention, ModelSpec
from tests.support.models import cluster, job

NODE, NODES = cluster("8xH100"), cluster("64xH100")
TOKENS = 3072
"""Three sequences of 1,024 tokens."""
DENSE = ModelSpec(
    name="dense", family="llama", num_layers=6, hidden_size=320, ffn_hidden_size=896, num_attention_heads=12,
    num_key_value_heads=3, head_dim=40, vocab_size=5003, max_position_embeddings=4096,
)  # fmt: skip
"""Queries of 480, keys of 120."""
GPT = ModelSpec(
    name="gpt", family="gpt2", num_layers=5, hidden_size=384, ffn_hidden_size=1600, num_attention_heads=6,
    num_key_value_heads=6, head_dim=64, vocab_size=5003, max_position_embeddings=1024, rope_theta=None,
    tied_embeddings=True,
)  # fmt: skip
MISTRAL = dataclasses.replace(DENSE, name="mistral", family="mistral", sliding_window=256)
GEMMA = dataclasses.replace(
    DENSE, name="gemma", family="gemma2", sliding_window=256, full_attention_every=2, query_pre_attn_scalar=40,
    attention_softcap=50.0, logit_softcap=30.0,
)  # fmt: skip
EXPERTS = ModelSpec(
    name="experts", family="glm4_moe", num_layers=7, hidden_size=320, ffn_hidden_size=1152, num_attention_heads=8,
    num_key_value_heads=4, head_dim=56, vocab_size=5003, max_position_embeddings=4096, num_experts=12,
    experts_per_token=3, moe_ffn_hidden_size=200, num_shared_experts=2, first_dense_layers=2,
)  # fmt: skip
"""Two dense layers, then five with 12 experts; queries of 448, keys of 224; shared experts of 400 together."""
LATENT = ModelSpec(
    name="latent", family="deepseek_v3", num_layers=4, hidden_size=352, ffn_hidden_size=1152, num_attention_heads=10,
    num_key_value_heads=10, head_dim=64, vocab_size=5003, max_position_embeddings=4096, num_experts=12,
    experts_per_token=3, moe_ffn_hidden_size=200, num_shared_experts=1, first_dense_layers=4,
    latent=LatentAttention(kv_lora_rank=96, nope_head_dim=40, rope_head_dim=24, value_head_dim=48, q_lora_rank=160),
)  # fmt: skip
"""Queries and keys of 640, values of 480."""
STACKS = ModelSpec(
    name="stacks", family="bart", num_layers=3, encoder_layers=2, hidden_size=384, ffn_hidden_size=1600,
    num_attention_heads=6, num_key_value_heads=6, head_dim=64, vocab_size=5003, max_position_embeddings=1024,
    rope_theta=None, tied_embeddings=True,
)  # fmt: skip
MIXED = dataclasses.replace(
    DENSE, name="mixed", family="transformers", sliding_window=256,
    approximate=Approximation(
        config={"model_type": "mixed"}, counted=True, parameters=9_000_000, tables=3_200_000, matrices=4_800_000,
        recurrent=1_200_000, attention_layers=4, windowed_layers=1, recurrent_layers=2, mlp_layers=5, state=7_000,
        state_width=900,
    ),
)  # fmt: skip
"""Of six layers four attend, one through a window, and two are recurrent; five have an MLP."""


def work(layout: Layout, model: ModelSpec = DENSE, machines: ClusterSpec = NODE, **changes: Any) -> Workload:
    """Sequences of 1,024 tokens, three in a micro batch unless the layout says otherwise."""
    batch = layout.micro_batch_size if layout.micro_batch_size > 1 else 3
    return Workload(model, machines, job(**{"seq_length": 1024, **changes}), layout.but(micro_batch_size=batch))


def other(workload: Workload, **own: Any) -> Workload:
    """What another program does otherwise (benchmarks/accuracy/programs): properties of a workload."""
    vars(workload).update(own)
    return workload


def how(workload: Workload, **own: Any) -> Workload:
    """The same for properties of the execution."""
    execution = copy.copy(workload.execution)
    vars(execution).update(own)
    return other(workload, execution=execution)


Rows = list[tuple[str, Callable[[], Any], Any]]
"""What it is, how kit computes it, and the value derived by hand."""


def by_hand(*tables: Rows) -> Callable[..., None]:
    """A test of each row of these tables: what kit computes is what was derived."""
    rows = [row for table in tables for row in table]

    @pytest.mark.parametrize(("computed", "derived"), [row[1:] for row in rows], ids=[row[0] for row in rows])
    def test_value(computed: Callable[[], Any], derived: Any) -> None:
        assert flat(computed()) == pytest.approx(flat(derived), rel=1e-9)

    return test_value


def flat(value: Any) -> list[Any]:
    """What is in nested lists, mappings and named tuples."""
    if isinstance(value, dict):
        return flat(sorted(value.items()))
    if isinstance(value, list | tuple):
        return [each for part in value for each in flat(part)]
    return [value]
