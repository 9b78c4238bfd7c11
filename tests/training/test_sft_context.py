"""SFT on sequences that ranks split: the gradients of rows alone, padded and packed, by ring and by all-to-alls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.specs.job import LoraSpec
from kit.training.data.loader import open_samples
from tests.megatron import shapes
from tests.support import tiny
from tests.support.workers import pool
from tests.training import cases
from tests.training.sft_rows import gradients_of_a_step, rows_alone, rows_on_disk

RING, ULYSSES = ({"engine": "torch", "zero_stage": 3, "cp": 2, "cp_comm_type": way} for way in ("p2p", "a2a"))
ZERO = [{**ULYSSES, "engine": "deepspeed", "zero_stage": stage} for stage in (2, 3)]
LONG = {"recompute": "full", "chunked_loss": True, "activation_offloading": True, "tiled_mlp": True}
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "ring-padded": ("gpt2", False, RING),
    "ring-packed": ("gpt2", True, RING),
    "ring-of-four-packed": ("qwen3", True, {**RING, **LONG, "cp": 4}),
    "ring-two-groups-packed": ("llama", True, {**RING, "dp": 2, "zero_stage": 2}),
    "ulysses-padded": ("qwen3", False, ULYSSES),
    "ulysses-packed": ("gpt2", True, ULYSSES),
    "ulysses-of-four-packed": ("llama", True, {**ULYSSES, **LONG, "cp": 4}),
    "zero2-padded": ("llama", False, ZERO[0]),
    "zero2-packed": ("qwen3", True, ZERO[0]),
    "zero3-packed": ("phi3", True, ZERO[1]),
}
"""Key heads are two: on four ranks two have each. GPT-2's positions are learned, so that wrong ones show; Phi-3 is of
the families whose packed rows transformers masks where ranks do not split them."""


@pytest.mark.everyday("ring-padded", "ring-of-four-packed", "ulysses-packed", "zero2-packed")
@pytest.mark.parametrize("case", CASES)
def test_a_split_row_has_the_gradients_of_rows_alone(tmp_path: Path, case: str) -> None:
    """Over all labels of the step, whichever rank has them; the loss too, in evaluation as well."""
    family, packing, layout = CASES[case]
    expected = rows_alone(tmp_path, tiny.model(family), packing)
    rundir = expected.run_directory(tmp_path / "run", layout)
    for rank in pool(layout["engine"], rundir.plan.layout.world_size).run(gradients_of_a_step, rundir):
        assert [(rank[key].tokens, rank[key].mean) for key in ("loss", "evaluated")] == [
            (expected.tokens, pytest.approx(expected.mean, rel=1e-6))
        ] * 2
        if rank["gradients"]:
            assert cases.worst(rank["gradients"], expected.gradients) < 1e-5


@pytest.mark.parametrize("layout", [RING, ZERO[0]], ids=["ring", "zero2"])
def test_every_micro_batch_has_the_frequencies_of_its_own_length(tmp_path: Path, layout: dict[str, Any]) -> None:
    """Rows are of 4 to 30 tokens; above 20 rotary embeddings take others (longrope). One process says which."""
    spec = tiny.model("phi3", rope_scaling=shapes.LONGROPE | {"original_max_position_embeddings": 20})
    expected = rows_alone(tmp_path, spec, packing=False)
    one, split = (expected.run_directory(tmp_path / name, each) for name, each in (("one", {}), ("split", layout)))
    whole = pool("torch", 1).run(gradients_of_a_step, one)[0]
    found = pool(layout["engine"], 2).run(gradients_of_a_step, split)[0]
    assert found["loss"].mean == pytest.approx(whole["loss"].mean, rel=1e-6)
    assert cases.worst(found["gradients"], whole["gradients"]) < 1e-5


@pytest.mark.parametrize("layout", [RING, ULYSSES], ids=["ring", "ulysses"])
def test_adapters_learn_from_split_rows(tmp_path: Path, layout: dict[str, Any]) -> None:
    expected, lora = rows_alone(tmp_path, tiny.model("qwen3"), packing=True), LoraSpec(rank=2)
    one, split = (
        expected.run_directory(tmp_path / name, each, lora=lora) for name, each in (("one", {}), ("split", layout))
    )
    whole, found = (pool("torch", size).run(gradients_of_a_step, each)[0] for size, each in ((1, one), (2, split)))
    assert cases.worst(found["gradients"], whole["gradients"]) < 1e-5


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("context-local-positions", "ring-packed"),
        ("context-scaled-by-data-ranks", "ulysses-padded"),
        ("ulysses-one-average", "zero3-packed"),
        ("ring-joins-documents", "ring-packed"),
        ("split-rows-join-documents", "zero2-packed"),
    ],
)
@pytest.mark.nightly
def test_a_planted_fault_turns_the_comparison_red(tmp_path: Path, fault: str, case: str) -> None:
    family, packing, layout = CASES[case]
    expected = rows_alone(tmp_path, tiny.model(family), packing)
    rundir = expected.run_directory(tmp_path / "run", layout)
    found = pool(layout["engine"], rundir.plan.layout.world_size).run(gradients_of_a_step, rundir, fault)[0]
    assert cases.worst(found["gradients"], expected.gradients) > 1e-3


@pytest.mark.parametrize(("cp", "length"), [(1, 8), (8, 16), (12, 24)])
@pytest.mark.parametrize("packing", [False, True])
def test_rows_are_padded_to_equal_parts(tmp_path: Path, packing: bool, cp: int, length: int) -> None:
    """Of a ring of eight two each: a length of 8 has no sixteen parts."""
    plan = tiny.plan(job={"objective": "sft", "seq_length": 48}, cp=cp)
    samples = open_samples(plan, tiny.run_directory(tmp_path, plan).run, str(rows_on_disk(tmp_path / "train")))
    shortest = min(range(len(samples)), key=samples.length)
    assert samples.length(shortest) <= 8
    assert samples.micro_batches([[shortest]])[0].input_ids.shape == (1, length)
