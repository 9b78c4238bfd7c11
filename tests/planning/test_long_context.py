"""Plans of sequences that are longer than one GPU's memory, beside what others measured."""

from __future__ import annotations

import pytest

from kit.planner.request import Request
from kit.planner.search import search
from kit.specs.catalog import load_model
from kit.specs.layout import Pins
from tests.planning.examples import cluster, job

MILLION = job(seq_length=1_048_576, global_batch_size=1)
PUBLISHED_GB = 56.2
"""Qwen3-8B, a row of 1,048,576 tokens on 8 H100, FSDP2 and a ring of 8: TRL 1.13, docs/source/long_context_training.md
and examples/sft_qwen3_8b_1m_context. Whether its GB are 10⁹ or 2³⁰ bytes is not said."""


def request(model: str, **pins: object) -> Request:
    """A million tokens on one node."""
    return Request(model=load_model(model), cluster=cluster("8xH100"), job=MILLION, pins=Pins(**pins))  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", [1e9, 2.0**30], ids=["GB", "GiB"])
def test_a_million_tokens_need_what_was_measured(unit: float) -> None:
    best = search(request("qwen3-8b")).best
    assert best is not None
    layout = best.layout
    assert (layout.engine, layout.cp, layout.cp_comm_type, layout.zero_stage) == ("torch", 8, "p2p", 3)
    assert layout.activation_offloading
    assert layout.chunked_loss
    assert best.peak_gib * 2**30 / unit == pytest.approx(PUBLISHED_GB, rel=0.15)


def test_without_host_memory_for_layer_inputs_it_does_not_fit() -> None:
    assert search(request("llama-3.1-8b")).best is not None
    assert search(request("llama-3.1-8b", activation_offloading=False)).best is None


def test_short_sequences_are_not_split() -> None:
    """The usual layouts fit, so no further ones are made."""
    found = search(
        Request(model=load_model("qwen3-8b"), cluster=cluster("8xH100"), job=job(), pins=Pins(engine="torch"))
    )
    assert all(candidate.layout.cp == 1 for candidate in found.considered)
