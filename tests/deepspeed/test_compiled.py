"""Compiled blocks and a chunked loss under ZeRO: plain torch's gradients, curve and norms."""

from __future__ import annotations

import pytest

from tests.deepspeed import cases, plain
from tests.support.workers import pool

STEPS = 2
TOLERANCE = 1e-5


def train(chosen, start, directory):
    """In a worker: a curve, and [graphs, kinds of breaks]. ``aot_eager`` traces as inductor does."""
    import torch
    import torch._dynamo.utils

    from kit.engines.kernels import compiled_blocks

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_blocks, "BACKEND", "aot_eager")
        curve = cases.train(chosen, start, directory, STEPS)
    return curve, [counters["stats"]["unique_graphs"], len(counters["graph_break"])]


@pytest.mark.everyday("1")
@pytest.mark.parametrize("stage", [1, 2])
def test_fp32_is_plain_torch(tmp_path, stage):
    start = cases.hf_directory(tmp_path)
    chosen = cases.plan(stage, compile_layers=True, chunked_loss=True)
    curve, (graphs, breaks) = pool("deepspeed", cases.WORLD_SIZE).run(train, chosen, start, tmp_path)[0]
    expected = plain.reference(start, STEPS)
    assert plain.gradient_error(curve, expected) < TOLERANCE
    assert plain.curve_error(curve.losses, expected.losses) < TOLERANCE
    assert plain.curve_error(curve.norms, expected.norms) < TOLERANCE
    assert 2 <= graphs <= 4 and breaks == 0  # noqa: PT018
