"""Times of layers that a search takes from another layout are those that the layout has itself."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kit.cost.time.step import StepTimer
from kit.cost.workload import Workload
from kit.specs.catalog import load_model
from kit.specs.layout import Layout
from tests.support.models import cluster, job

VALUES: dict[str, tuple[Any, ...]] = {
    "implementation": ("local", "transformer_engine"),
    "tp": (1, 2),
    "pp": (1, 4),
    "vp": (1, 2),
    "cp": (1, 2),
    "cp_comm_type": ("all_gather", "p2p", "a2a"),
    "ep": (1, 4),
    "etp": (1, 2),
    "sp": (False, True),
    "zero_stage": (0, 1),
    "recompute": ("none", "selective", "full"),
    "chunked_loss": (False, True),
    "compile_layers": (False, True),
    "attention_kernel": ("default", "cudnn"),
    "gradient_compression": ("none", "bf16"),
    "micro_batch_size": (1, 2),
    "gradient_accumulation_steps": (4, 8),
}


@pytest.mark.parametrize("engine", ["megatron", "torch", "deepspeed"])
def test_times_of_layers_are_shared_by_equal_layers_alone(engine: str) -> None:
    """A search asks one timer for thousands of layouts. It answers as a timer of its own would, in any order."""
    model, machines, shared = load_model("deepseek-v3"), cluster("64xH100"), StepTimer()
    own = {"megatron": VALUES, "torch": VALUES, "deepspeed": VALUES | {"zero_stage": (2, 3)}}[engine]
    if engine != "megatron":
        own = {**own, "implementation": ("huggingface",), "pp": (1,), "vp": (1,), "ep": (1,), "etp": (1,)}
    rng = random.Random(0)
    for _ in range(300):
        chosen = {name: rng.choice(values) for name, values in own.items()}
        workload = Workload(model, machines, job(), Layout(engine=engine, dp=8, **chosen))  # type: ignore[arg-type]
        assert shared.components_s(workload) == StepTimer().components_s(workload), chosen
