"""Memory of DeepSpeed in a published run: kit's own terms, with DeepSpeed's default sizes instead of kit's.

Defaults in elements: deepspeed/runtime/zero/config.py.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.accuracy.fields import offload_of, optimizer_of
from benchmarks.accuracy.fsdp_rows import SCALES
from benchmarks.accuracy.pipelines import Row
from benchmarks.accuracy.programs.adapters import adapter_parameters
from benchmarks.accuracy.programs.published import PublishedWorkload
from benchmarks.accuracy.programs.rank_params import layer_parameters
from kit.cost.memory.parts import EngineMemory
from kit.cost.memory.states import state_bytes
from kit.specs.job import Precision

REDUCE_BUCKET = 5e8
LIVE_PARAMETERS = 1e9
SUB_GROUP = 1e9


def with_deepspeed(row: Row, workload: PublishedWorkload) -> PublishedWorkload:
    """The workload with DeepSpeed's states and buffers."""
    job = row["job"]
    stage = int(job.get("zero_stage") or 0)
    optimizer, offload = optimizer_of(job), offload_of(job)
    layout = replace(
        workload.layout,
        zero_stage=stage,
        offload_optimizer=offload.place if offload.optimizer else "none",
        offload_param=offload.place if offload.parameters else "none",
    )
    precision: Precision = "fp32" if job.get("precision") == "fp32" else "bf16"
    element = 4.0 if precision == "fp32" else 2.0
    parameters = workload.parameters[0]
    state = state_bytes(layout, precision, optimizer.name)
    if not offload.optimizer and (optimizer.short_masters or optimizer.moment_bytes == 2):
        # Master weights, gradients and moments in 16 bits (runtime/config.py, bf16_master_weights_and_grads and
        # bf16_optimizer_states); DeepSpeed then makes no fp32 copy of gradients.
        owners = layout.dp * layout.cp if stage else 1
        short = optimizer.short_masters
        held = (2.0 if short else 4.0) + optimizer.moments * (optimizer.moment_bytes or 4.0)
        state = state._replace(optimizer=held / owners, extra_in_step=0.0 if short else state.extra_in_step)
    lora = workload.lora
    adapters = () if lora is None else (adapter_parameters(workload, lora, 0),)
    bucket = element * min(REDUCE_BUCKET, *adapters, parameters.total) if stage else 0.0
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
            save=4.0 * int(largest) if stage == 3 else 0.0,
            adapters=adapters,
            of_adapters=state if lora else None,
            # Stage 3 shards the 4-bit codes, which are parameters, but not their scales.
            matrix_weights=0.5 * state.weights / element + SCALES if lora and lora.four_bit else None,
        ),
    )
