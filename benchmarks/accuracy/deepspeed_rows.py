"""What DeepSpeed held in a published run: kit's own terms, with DeepSpeed's default sizes in place of kit's.

Defaults in elements: deepspeed/runtime/zero/config.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from benchmarks.accuracy.pipelines import Row
from benchmarks.accuracy.programs.published import PublishedWorkload
from benchmarks.accuracy.programs.rank_params import layer_parameters
from kit.cost.memory.phases import EngineMemory
from kit.cost.memory.states import state_bytes
from kit.specs.job import OptimizerName, Precision
from kit.specs.layout import Offload

REDUCE_BUCKET = 5e8
LIVE_PARAMETERS = 1e9
SUB_GROUP = 1e9


def with_deepspeed(row: Row, workload: PublishedWorkload) -> PublishedWorkload:
    """The workload with DeepSpeed's states and buffers."""
    job = row["job"]
    stage = int(job.get("zero_stage") or 0)
    offload = str(job.get("offload") or "").lower()
    layout = replace(
        workload.layout,
        zero_stage=stage,
        offload_optimizer=_place(offload, "optim"),
        offload_param=_place(offload, "param"),
    )
    precision: Precision = "fp32" if job.get("precision") == "fp32" else "bf16"
    element = 4.0 if precision == "fp32" else 2.0
    parameters = workload.parameters[0]
    state = state_bytes(layout, precision, _optimizer(job.get("optimizer") or ""))
    bucket = element * min(REDUCE_BUCKET, parameters.total) if stage else 0.0
    live = element * min(LIVE_PARAMETERS, parameters.total) if stage == 3 else 0.0
    largest = max(
        sum(layer_parameters(workload, False)),
        workload.model.vocab_size * workload.model.hidden_size / workload.layout.tp,
    )
    return replace(
        workload,
        engine=EngineMemory(
            dense=state,
            experts=state,
            most_step_extra=4.0 * SUB_GROUP if stage == 3 else float("inf"),
            buffers=bucket if stage == 3 else 0.0,
            gathered=(live, live, live) if stage == 3 else (0.0, 2 * bucket, 2 * bucket),
            largest_parameter=int(largest) if stage == 3 else 0,
        ),
    )


def _place(offload: str, what: Literal["optim", "param"]) -> Offload:
    if what not in offload and not (what == "optim" and offload in ("cpu", "nvme")):
        return "none"
    return "nvme" if "nvme" in offload else "cpu"


def _optimizer(name: str) -> OptimizerName:
    name = name.lower()
    found: dict[str, OptimizerName] = {
        "muon": "muon",
        "8-bit": "adamw-8bit",
        "8bit": "adamw-8bit",
        "adafactor": "adafactor",
    }
    for mark, optimizer in found.items():
        if mark in name:
            return optimizer
    return "sgd" if "sgd" in name else "adamw"
