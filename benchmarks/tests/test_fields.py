"""What a row says in words: each has one meaning, and one without a meaning is named."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.accuracy.fields import (
    Offload,
    date_of,
    dispatcher_of,
    mean_length,
    megatron_layers,
    offload_of,
    optimizer_of,
    precision_of,
    program_of,
    recomputed_layers,
    recomputed_modules,
)
from benchmarks.accuracy.lora_rows import lora_of, lora_spec
from benchmarks.accuracy.pipelines import NotPredictedError
from benchmarks.accuracy.programs.published import PublishedWorkload
from benchmarks.accuracy.rows import state_widths
from benchmarks.tests.test_setup import GPT, LAYOUT
from tests.support.models import cluster
from tests.support.models import job as job_of
from tests.support.refusals import refusal

ALL = {"query", "key", "value", "projection", "mlp"}


def row(address: str = "", notes: str = "", date: str | None = None, **job: Any) -> dict[str, Any]:
    return {"source": {"address": address, "date": date}, "notes": notes, "job": job, "model": {}}


@pytest.mark.parametrize(
    ("words", "name", "moment_bytes", "also"),
    [
        ("adam", "adamw", None, set()),
        ("adamw 8-bit, fused in backward", "adamw-8bit", 1 + 4 / 256, {"in_backward"}),
        ("PagedAdamW8bit (preset)", "adamw-8bit", 1 + 4 / 256, {"paged"}),
        ("adam (bf16 moments, fp32 master; precision-aware)", "adamw", 2.0, set()),
        ("FusedAdam, bf16_master_weights_and_grads, bf16_optimizer_states", "adamw", 2.0, {"short_masters"}),
        ("adamw, bf16 weights, fp32 states", "adamw", None, set()),
        ("dist_muon", "muon", None, set()),
    ],
)
def test_an_optimizer(words, name, moment_bytes, also):
    found = optimizer_of({"optimizer": words})
    assert (found.name, found.moment_bytes) == (name, moment_bytes)
    assert {flag for flag in ("in_backward", "paged", "short_masters") if getattr(found, flag)} == also


@pytest.mark.parametrize(
    ("words", "engine", "expected"),
    [
        (None, "fsdp", ()),
        ("optimizer to host (exact flags not per row)", "deepspeed", ()),
        ("optimizer memory to CPU as needed, update on GPU", "deepspeed", (1.0, False, False, None, "cpu", True)),
        ("cpu", "deepspeed", (1.0,)),
        ("cpu", "fsdp", (1.0, True)),
        ("optimizer states to CPU, fraction 0.25", "megatron", (0.25,)),
        ("parameters and optimizer to NVMe", "deepspeed", (1.0, True, False, None, "nvme")),
        ("activations of 20 layers to host", "megatron", (0.0, False, True, 20)),
    ],
)
def test_an_offload(words, engine, expected):
    assert offload_of({"offload": words, "engine": engine}) == Offload(*expected)


@pytest.mark.parametrize(
    ("read", "given", "expected"),
    [
        (program_of, row("pytorch/ao:docs/training.md"), "torchtitan"),
        (program_of, row("who/knows:README.md", "transformers' models under FSDP1"), "huggingface"),
        (program_of, row("pytorch/ao:x.md", program="Hugging Face"), "huggingface"),
        (date_of, row("pytorch/torchtitan:benchmarks/llama3_h100_202412_torchtitan.md@b5bcd76c6"), "2024-12"),
        (date_of, row("x_202412_y.md", date="2025-06-04"), "2025-06-04"),
        (lambda words: recomputed_layers(words, 9), "every 2nd layer", 4),
        (lambda words: recomputed_layers(words, 9), "method=block num_layers=5", 5),
        (lambda words: recomputed_layers(words, 9), "method=uniform num_layers=1", None),
        (recomputed_modules, "modules=['layernorm', 'moe_act']", {"layernorm", "moe_act"}),
        (recomputed_modules, "selective AC, per-op policy (preset)", {"op"}),
    ],
)
def test_program_date_and_recompute_are_read_from_source_notes_and_words(read, given, expected):
    assert read(given) == expected


@pytest.mark.parametrize(
    ("job", "megatrons"),
    [
        ({"engine": "fsdp", "attention": "te"}, True),
        ({"engine": "fsdp", "attention": "te fused"}, True),
        ({"engine": "fsdp", "attention": "flash2"}, False),
        ({"engine": "deepspeed", "transformer_impl": "local"}, True),
        ({"engine": "megatron"}, True),
        ({"engine": "ddp", "attention": None}, False),
    ],
)
def test_whose_layers_ran(job, megatrons):
    assert megatron_layers(row(**job)) == megatrons


def test_tokens_per_second_of_padded_batches_count_the_tokens_of_their_mean_sequence():
    """4,198,051 tokens in 5,000 steps of 4 sequences, padded to up to 768."""
    words = "tokens/s counts real tokens (4,198,051 over 5,000 steps of 4); memory is reserved"
    assert [mean_length(row(notes=notes) | {"model": {"seq_length": 768}}) for notes in (words, "")] == [210, 768]


def test_digits_of_a_commit_are_no_date():
    assert date_of(row("README.md@202412345")) > "2026"


@pytest.mark.parametrize(
    ("read", "given", "what"),
    [
        (optimizer_of, {"optimizer": "a new one"}, "job.optimizer='a new one'"),
        (offload_of, {"offload": "somewhere"}, "job.offload='somewhere'"),
        (precision_of, row(precision="int5"), "job.precision='int5'"),
        (dispatcher_of, row() | {"model": {"moe": {"dispatcher": "teleport"}}}, "dispatcher='teleport'"),
    ],
)
def test_a_word_without_meaning_is_named(read, given, what):
    assert re.search(f"{what} is not understood", refusal(NotPredictedError, read, given))


@pytest.mark.parametrize(
    ("lora", "job", "expected"),
    [
        (None, {}, None),
        (True, {"engine": "megatron"}, (32, {"query", "key", "value"}, False, True)),
        (True, {"engine": "ddp"}, (64, {"query", "value", "projection", "mlp"}, False, False)),
        ({"rank": 8, "targets": "all-linear", "four_bit": True}, {}, (8, ALL, True, False)),
        ({"rank": 8, "targets": ["c_attn", "c_proj", "w1", "w2"]}, {}, (8, ALL, False, True)),
        ({"rank": 4, "targets": ["q_proj", "v"], "quant": "nf4"}, {}, (4, {"query", "value"}, True, False)),
    ],
)
def test_adapters(lora, job, expected):
    found = lora_of(row(**{"engine": "deepspeed", "lora": lora} | job))
    assert (found and (found.rank, found.targets, found.four_bit, found.fused)) == expected
    if found:
        workload = PublishedWorkload(
            model=GPT, cluster=cluster("8xH100"), job=job_of(lora=lora_spec(found)), layout=LAYOUT, lora=found
        )
        several = {"query", "key", "value"} <= found.targets and found.fused
        assert len(workload.adapted) == len(found.targets) + ("mlp" in found.targets) - 2 * several


def test_adapters_that_nobody_knows_are_named():
    for lora, said in (({"targets": ["q"]}, "unstated rank"), ({"rank": 8, "targets": ["x"]}, "lora.targets='x'")):
        assert said in refusal(NotPredictedError, lora_of, row(engine="deepspeed", lora=lora))


def test_bytes_of_a_state_are_fields():
    states = {"device": {"weights": 2, "grads": 2}, "host": {"master": 4, "moments": 8}}
    for stated, widths in ((states, (2, 2, 0)), ({"weights": 2, "moments": 4}, (2, 2, 4)), (None, (2, 4, 12))):
        assert state_widths(row(engine="deepspeed", state_bytes=stated), optimizer_of({})) == widths
    for lora, widths in ((None, (2, 2, 4)), (True, (2, 4, 8))):
        loaded = row(engine="ddp", lora=lora, precision="bf16", notes="transformers, bf16 weights")
        assert state_widths(loaded, optimizer_of({})) == widths
    frozen = row(engine="ddp", lora=True, precision="bf16", notes="torchtitan")
    assert state_widths(frozen, optimizer_of({})) == (2, 4, 8)
