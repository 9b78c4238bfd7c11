"""Plans of sequences that are longer than one GPU's memory, beside what others measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kit.cost.hardware import usable_gib
from kit.cost.memory.activations_huggingface import layer_input
from kit.planner.request import Request
from kit.planner.search import search
from kit.specs.catalog import load_model
from kit.specs.job import LoraSpec
from kit.specs.layout import Pins
from kit.units import to_gib
from tests.support.models import cluster, job

MILLION = job(seq_length=1_048_576, global_batch_size=1)
PUBLISHED_GB = 56.2
"""Qwen3-8B, a row of 1,048,576 tokens on 8 H100, FSDP2 and a ring of 8: TRL 1.13, docs/source/long_context_training.md
and examples/sft_qwen3_8b_1m_context. Its offload is transformers', with no input ahead. Whether its GB are 10⁹ or 2³⁰
bytes is not said."""


def request(model: str, **pins: object) -> Request:
    """A million tokens on one node."""
    return Request(model=load_model(model), cluster=cluster("8xH100"), job=MILLION, pins=Pins(**pins))  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", [1e9, 2.0**30], ids=["GB", "GiB"])
def test_a_million_tokens_need_what_was_measured(unit: float) -> None:
    best = search(request("qwen3-8b")).best
    layout = best.layout
    assert (layout.engine, layout.cp, layout.cp_comm_type, layout.zero_stage) == ("torch", 8, "p2p", 3)
    assert layout.activation_offloading
    assert layout.chunked_loss
    assert not layout.tiled_mlp  # TRL has none, and here it is not needed
    assert best.peak_gib * 2**30 / unit == pytest.approx(PUBLISHED_GB, rel=0.15)


def test_rows_of_sft_are_split_as_text_is_and_adapters_need_less() -> None:
    """TRL's figure is of SFT."""
    whole, text = replace(request("qwen3-8b"), job=replace(MILLION, objective="sft")), search(request("qwen3-8b")).best
    best = search(whole).best
    assert (best.layout, best.peak_gib) == (text.layout, text.peak_gib)
    adapters = search(replace(whole, job=replace(whole.job, lora=LoraSpec()))).best
    assert (adapters.layout.cp, adapters.peak_gib < 0.8 * best.peak_gib) == (8, True)


def test_without_host_memory_for_layer_inputs_mlps_are_tiled() -> None:
    assert search(request("llama-3.1-8b")).best is not None
    on_gpu = {"activation_offloading": False}
    assert search(request("llama-3.1-8b", **on_gpu, tiled_mlp=False)).best is None
    assert search(request("llama-3.1-8b", **on_gpu)).best.layout.tiled_mlp


def test_llama_fits_up_to_the_length_that_alst_reached() -> None:
    """3.7M tokens of Llama-8B on 8 H100 is the longest that ALST trains (arXiv 2506.13996, abstract): ZeRO-3, Ulysses,
    tiles, checkpoints and, as assumed here, optimizer state on the host, without an input ahead."""
    alst = Pins(engine="deepspeed", cp=8, cp_comm_type="a2a", zero_stage=3, offload_optimizer="cpu", recompute="full")
    alst = alst.but(activation_offloading=True, chunked_loss=True, tiled_mlp=True)

    def needed_gib(tokens: int, ahead: bool = True) -> float:
        long = job(seq_length=tokens // 64 * 64, global_batch_size=1)
        asked = Request(model=load_model("llama-3.1-8b"), cluster=cluster("8xH100"), job=long, pins=alst)
        found = search(asked).considered  # none where host memory is short
        sizes = [(each.peak_gib, to_gib(layer_input(asked.workload(each.layout)))) for each in found]
        return min((peak - (0.0 if ahead else own) for peak, own in sizes), default=math.inf)

    usable = usable_gib(cluster("8xH100").gpu)
    assert needed_gib(3_700_000, ahead=False) <= usable
    assert needed_gib(round(1.15 * 3_700_000), ahead=False) > usable
    # kit copies one more layer's input back at the same time, which costs 5 % of the length.
    assert needed_gib(3_500_000) <= usable < needed_gib(3_700_000)
