"""How often the host waits for the device in a step of Megatron-core's, and where: not once a micro batch."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from importlib.metadata import version

from tests.megatron import cases
from tests.support import tiny
from tests.support.host_syncs import waits_in_a_step
from tests.support.workers import pool


def second_step(rundir) -> Counter[str]:
    """In a worker: places of the second step, once everything is warm."""
    from kit.engines.megatron.engine import MegatronEngine

    with closing(MegatronEngine(rundir)) as engine:
        for step in range(2):
            batches = cases.micro_batches(rundir.plan.model.vocab_size, step, engine.dp_rank, engine.dp_size)
            waits, _ = waits_in_a_step(engine, batches)
    return waits


def test_waits_of_a_step(tmp_path):
    """Three of Megatron-core's optimizer step; ours is that of loss and token count. On a GPU with Transformer Engine
    or Apex the norm is made by their kernel, which does not ask. 0.16 also asks whether there are tokens."""
    rundir = cases.run_directory(tmp_path / "run", tiny.model(), model_path=None, dp=2, zero_stage=1)
    assert pool("megatron", 2).run(second_step, rundir)[0] == {
        "engine.py:_run": 1,
        **({"finalize_model_grads.py:finalize_model_grads": 1} if version("megatron-core").startswith("0.16.") else {}),
        "utils.py:local_multi_tensor_l2_norm": 1,
        "clip_grads.py:get_grad_norm_fp32": 1,
    }
