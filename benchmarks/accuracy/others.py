"""Compares errors of other estimators with kit's, on the rows that each estimator supports: those that the installed
packages have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.accuracy.memory import Result
from benchmarks.accuracy.programs.published import PublishedModel, PublishedWorkload
from benchmarks.accuracy.programs.rank_params import layer_parameters
from benchmarks.accuracy.rows import workload_of
from benchmarks.accuracy.strata import Errors, errors_by, own_errors
from kit.units import to_gib

Estimate = Callable[[PublishedWorkload], float]
"""Bytes of a GPU."""


def deepspeed_estimate(workload: PublishedWorkload) -> float:
    """``estimate_zero3_model_states_mem_needs`` of fully sharded runs, ``estimate_zero2_…`` of others, no offload."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    # The estimator knows only data parallelism, so it gets the parameters of one model-parallel rank.
    whole = replace(workload.layout, tp=1, pp=1, vp=1, cp=1, ep=1, etp=1)
    parameters = replace(workload, layout=whole, stated_chunks=()).parameters[0].total
    total = int(parameters / (workload.layout.tp * workload.layout.pp))
    ranks = workload.layout.dp * workload.layout.cp
    if workload.layout.zero_stage != 3:
        return float(estimate_zero2_model_states_mem_needs(total, num_gpus_per_node=ranks, cpu_offload=False)[1])
    layer = sum(layer_parameters(replace(workload, layout=replace(workload.layout, tp=1)), False))
    largest = int(max(layer, workload.model.vocab_size * workload.model.hidden_size))
    return float(estimate_zero3_model_states_mem_needs(total, largest, num_gpus_per_node=ranks, cpu_offload=False)[1])


def accelerate_estimate(workload: PublishedWorkload) -> float:
    """``accelerate estimate-memory``'s peak of training with Adam in bf16: its functions on a model of meta tensors."""
    return _accelerate(workload.model)


@cache
def _accelerate(spec: PublishedModel) -> float:
    from accelerate import init_empty_weights  # type: ignore[import-untyped]
    from accelerate.commands.estimate import estimate_training_usage  # type: ignore[import-untyped]
    from accelerate.utils import calculate_maximum_sizes  # type: ignore[import-untyped]
    from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedConfig

    sizes: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    config: PreTrainedConfig = GPTNeoXConfig(**sizes)
    if spec.gated_mlp:
        config = LlamaConfig(**sizes, num_key_value_heads=spec.num_key_value_heads, head_dim=spec.head_dim)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    size, _ = calculate_maximum_sizes(model)
    return float(max(estimate_training_usage(size, "bfloat16").values()))


ESTIMATORS: dict[str, tuple[Estimate, Callable[[PublishedWorkload], bool]]] = {
    "DeepSpeed's estimate_zero3 (states alone), fully sharded rows": (
        deepspeed_estimate,
        lambda workload: workload.layout.zero_stage == 3,
    ),
    "DeepSpeed's estimate_zero2 (states alone), rows with a sharded optimizer": (
        deepspeed_estimate,
        lambda workload: (
            workload.layout.zero_stage in (1, 2) and workload.layout.dp > 1 and not workload.model.num_experts
        ),
    ),
    "accelerate estimate-memory (states of one device), one-GPU rows": (
        accelerate_estimate,
        lambda workload: (
            workload.layout.dp * workload.layout.tp * workload.layout.pp * workload.layout.cp == 1
            and workload.lora is None
        ),
    ),
}


def comparisons(results: list[Result]) -> dict[str, Errors]:
    """Errors of each estimator and of kit on the same rows. DeepSpeed and accelerate must be installed."""
    table = {}
    rows = [
        (result, workload_of(result.row))
        for result in results
        if not result.excluded
        and result.predicted_gib is not None
        and result.statistic != "allocated"
        and result.measured_gib > 4
    ]
    for name, (estimate, applies) in ESTIMATORS.items():
        chosen = [(result, workload) for result, workload in rows if applies(workload)]
        table[name] = [
            (result.row["group"], to_gib(estimate(workload)) / result.measured_gib - 1) for result, workload in chosen
        ]
        table[f"ours on the same ({name.partition(',')[2].strip()})"] = own_errors(result for result, _ in chosen)
    return errors_by(table)
