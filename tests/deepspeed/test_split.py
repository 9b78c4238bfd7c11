"""Ulysses, AutoTP and hpZ against plain torch on 2 processes; all of it is in
``tests.system.parity.deepspeed``."""

from __future__ import annotations

import pytest

from tests.deepspeed import cases, plain
from tests.megatron import shapes
from tests.support import tiny
from tests.support.workers import pool

STEPS = 3
TOLERANCE = 1e-5
ULYSSES = {"cp": 2, "cp_comm_type": "a2a", "dp": 1, "gradient_accumulation_steps": 4}
LONG = {"recompute": "full", "chunked_loss": True, "activation_offloading": True}
AUTOTP = {"tp": 2, "dp": 1, "gradient_accumulation_steps": 4}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return cases.hf_directory(tmp_path_factory.mktemp("start"))


def run(case, *arguments):
    return pool("deepspeed", cases.WORLD_SIZE).run(case, *arguments)


LAYOUTS = {
    "Ulysses, stage 0": cases.plan(0, **ULYSSES),
    "Ulysses, stage 2": cases.plan(2, **ULYSSES),
    "Ulysses, stage 3": cases.plan(3, **ULYSSES),
    "Ulysses, stage 2, long sequences": cases.plan(2, **ULYSSES, **LONG),
    "Ulysses, stage 3, long sequences": cases.plan(3, **ULYSSES, **LONG),
    "AutoTP, stage 0": cases.plan(0, **AUTOTP),
    "AutoTP, stage 3": cases.plan(3, **AUTOTP),
    "hpZ": cases.plan(3, zero_hpz=2),
}


@pytest.mark.everyday("Ulysses, stage 0")
@pytest.mark.parametrize("chosen", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_fp32_is_plain_torch(chosen, start, tmp_path):
    curve, expected = run(cases.train, chosen, start, tmp_path, STEPS)[0], plain.reference(start, STEPS)
    assert plain.gradient_error(curve, expected) < TOLERANCE
    assert plain.curve_error(curve.losses, expected.losses) < TOLERANCE
    assert plain.curve_error(curve.norms, expected.norms) < TOLERANCE


def test_ulysses_chooses_longropes_frequencies_by_the_whole_sequence(tmp_path):
    """The first rank's own positions are all below ``original_max_position_embeddings``."""
    spec = tiny.model("phi3", rope_scaling=shapes.LONGROPE | {"original_max_position_embeddings": 24})
    start = cases.hf_directory(tmp_path, spec=spec)
    curve = run(cases.train, cases.plan(2, spec=spec, **ULYSSES), start, tmp_path, 1)[0]
    assert plain.gradient_error(curve, plain.reference(start, 1)) < TOLERANCE


@pytest.mark.everyday("ulysses-one-average-Ulysses, stage 3")
@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        ("ulysses-one-average", "Ulysses, stage 3"),
        ("ulysses-local-positions", "Ulysses, stage 2"),
        ("hpz-stale-copy", "hpZ"),
    ],
)
def test_a_planted_fault_turns_the_comparison_red(fault, layout, start, tmp_path):
    curve = run(cases.train, LAYOUTS[layout], start, tmp_path, STEPS, fault)[0]
    assert plain.gradient_error(curve, plain.reference(start, STEPS)) > 1000 * TOLERANCE


def test_bf16_of_ulysses_counts_every_rank_in_the_norm(start, tmp_path):
    """Stage 1 with accumulation is another optimizer, which takes sequence-parallel ranks for model-parallel ones."""
    curve = run(cases.train, cases.plan(1, precision="bf16", **ULYSSES), start, tmp_path, STEPS)[0]
    assert plain.curve_error(curve.norms, plain.reference(start, STEPS).norms) < 5e-3


def test_a_split_goes_on_as_another_through_the_exchange_checkpoint(start, tmp_path):
    run(cases.leave, LAYOUTS["Ulysses, stage 3"], start, tmp_path, STEPS)
    curve, different = run(cases.go_on, LAYOUTS["AutoTP, stage 0"], tmp_path / "exchange", tmp_path, STEPS)[0]
    expected = plain.reference(start, 2 * STEPS)
    assert different == []
    assert plain.curve_error(curve.losses, expected.losses[STEPS:]) < TOLERANCE
    assert plain.curve_error(curve.norms, expected.norms[STEPS:]) < TOLERANCE
