"""Tiled MLPs under ZeRO, whose hooks wait for every gradient, against plain torch with whole ones, on 2 processes."""

from __future__ import annotations

import pytest

from tests.deepspeed import cases, plain
from tests.support import tiny
from tests.support.workers import pool

SPEC = tiny.model(hidden_size=8, num_attention_heads=2, num_key_value_heads=2)
"""Four tiles of 32 tokens; two of half of them."""
LONG = {"recompute": "full", "chunked_loss": True, "activation_offloading": True}
ULYSSES = {"cp": 2, "cp_comm_type": "a2a", "dp": 1, "gradient_accumulation_steps": 4}
LAYOUTS = {
    "stage 0": (0, {}),
    "stage 1": (1, {"recompute": "full"}),
    "stage 2": (2, {}),
    "stage 2, optimizer on the host": (2, {"offload_optimizer": "cpu", **LONG}),
    "stage 3": (3, {}),
    "stage 3, all on the host": (3, {"offload_optimizer": "cpu", "offload_param": "cpu", **LONG}),
    "Ulysses, stage 2": (2, ULYSSES),
    "Ulysses, stage 3": (3, ULYSSES | LONG),
}


@pytest.mark.everyday("stage 0")
@pytest.mark.parametrize(("stage", "layout"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_fp32_is_plain_torch(stage, layout, tmp_path):
    start = cases.hf_directory(tmp_path, spec=SPEC)
    chosen = cases.plan(stage, spec=SPEC, tiled_mlp=True, **layout)
    curve = pool("deepspeed", cases.WORLD_SIZE).run(cases.train, chosen, start, tmp_path, 2)[0]
    expected = plain.reference(start, 2)
    assert plain.gradient_error(curve, expected) < 1e-5
    assert plain.curve_error(curve.losses, expected.losses) < 1e-5
    assert plain.curve_error(curve.norms, expected.norms) < 1e-5
