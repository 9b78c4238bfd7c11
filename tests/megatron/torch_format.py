"""Megatron-LM's old ``torch`` format, written inside a pool of workers from megatron-core's own state dicts.

Megatron-LM's trainer cannot be installed: the frame of the file (``args``, ``iteration``, names of directories) is
written here as its ``save_checkpoint`` and ``generate_state_dict`` do. Model and optimizer are megatron-core's own.
"""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.megatron.checkpoints import COUNTERS, steps
from tests.support.checkpoints import export

ITERATION = 2


def save(engine: Any, rundir: Any, root: Path) -> list[float]:
    """Train 2 steps, write what Megatron-LM would, and kit's checkpoint; the curve of the 2 steps after."""
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnBackend

    steps(engine, rundir, 0, ITERATION)
    model, layout = rundir.plan.model, rundir.plan.layout
    arguments = Namespace(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        group_query_attention=model.num_key_value_heads != model.num_attention_heads,
        consumed_train_samples=COUNTERS.samples_seen,
        params_dtype=torch.float32,
        attention_backend=AttnBackend.auto,
    )
    state: dict[str, Any] = {"args": arguments, "checkpoint_version": 3.0, "iteration": ITERATION}
    for number, chunk in enumerate(engine._chunks):
        name = "model" if len(engine._chunks) == 1 else f"model{number}"
        # Transformer Engine has a state for fp8 beside the tensors, often none.
        state[name] = chunk.state_dict_for_save_checkpoint() | {"decoder.layers.0._extra_state": None}
    state["optimizer"] = engine._optimizer.state_dict()
    states = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}
    state["rng_state"] = [states | {"torch_rng_state": torch.get_rng_state()}]
    if parallel_state.get_data_parallel_rank() == 0:
        name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
        if layout.pp > 1:
            name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
        path = root / "megatron" / f"iter_{ITERATION:07d}" / name / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(state, path)
    if dist.get_rank() == 0:
        (root / "megatron/latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    export(engine, root / "expected", rundir.plan, COUNTERS, shard_bytes=20_000)
    return steps(engine, rundir, ITERATION)
