"""How often the host waits for the device in a step of DeepSpeed's, and where: not once a micro batch."""

from __future__ import annotations

from collections import Counter
from contextlib import closing

import pytest

from tests.deepspeed import cases
from tests.support.host_syncs import waits_in_a_step
from tests.support.workers import pool


def second_step(chosen, directory) -> Counter[str]:
    """In a worker: places of the second step, once everything is warm."""
    with closing(cases.build(chosen, None, directory)) as engine:
        waits_in_a_step(engine, cases.micro_batches(engine, chosen, 0))
        waits, _ = waits_in_a_step(engine, cases.micro_batches(engine, chosen, 1))
    return waits


OURS = {"loss.py:to_host": 1, "grad_norm.py:unscaled_norm": 1}
"""Loss and token count; and the norm, which is judged before the step, to which it is handed."""


@pytest.mark.everyday("1-deepspeeds0")
@pytest.mark.parametrize(
    ("stage", "deepspeeds"),
    [
        # Whether the norm is finite, and by what it clips (BF16_Optimizer).
        (1, {"utils.py:is_invalid_grad_norm": 1, "utils.py:clip_tensors_by_global_norm": 1}),
        # Whether any gradient overflowed, and three questions to the norm.
        (2, {"utils.py:is_invalid_grad_norm": 3, "stage_1_and_2.py:has_overflow": 1}),
        (3, {"utils.py:is_invalid_grad_norm": 1}),
    ],
)
def test_waits_of_a_step_in_bf16(tmp_path, stage, deepspeeds):
    chosen = cases.plan(stage, precision="bf16", gradient_accumulation_steps=3)
    assert pool("deepspeed", cases.WORLD_SIZE).run(second_step, chosen, tmp_path)[0] == OURS | deepspeeds
