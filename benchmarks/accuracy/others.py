"""Other estimators' errors beside ours, on the rows that each can speak of."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.accuracy.memory import Result
from benchmarks.accuracy.rows import setup_of
from benchmarks.accuracy.strata import Errors, errors_of
from kit.cost.other_estimators import accelerate_estimate, deepspeed_zero3_estimate, megatron_theoretical
from kit.cost.setup import TrainingSetup
from kit.units import to_gib

ESTIMATORS: dict[str, tuple[Callable[[TrainingSetup], float], Callable[[TrainingSetup], bool]]] = {
    "Megatron-LM's theoretical formula, Megatron rows": (
        megatron_theoretical,
        lambda setup: setup.kernels in ("transformer-engine", "megatron-local") and setup.sharding != "full",
    ),
    "DeepSpeed's estimate_zero3 (states alone), fully sharded rows": (
        deepspeed_zero3_estimate,
        lambda setup: setup.sharding == "full",
    ),
    "accelerate estimate-memory (states of one device), one-GPU rows": (
        accelerate_estimate,
        lambda setup: setup.dp * setup.tp * setup.pp * setup.cp == 1 and setup.lora is None,
    ),
}


def comparisons(results: list[Result]) -> dict[str, Errors]:
    """Each estimator, followed by ours on the same rows."""
    table: dict[str, Errors] = {}
    rows = [
        (result, setup_of(result.row))
        for result in results
        if not result.excluded
        and result.predicted_gib is not None
        and result.statistic != "allocated"
        and result.measured_gib > 4
    ]
    for name, (estimate, applies) in ESTIMATORS.items():
        chosen = [(result, setup) for result, setup in rows if applies(setup)]
        theirs = errors_of(
            (result.row["group"], to_gib(estimate(setup)) / result.measured_gib - 1) for result, setup in chosen
        )
        ours = errors_of((result.row["group"], result.relative_error or 0.0) for result, _ in chosen)
        if theirs is not None and ours is not None:
            table[name] = theirs
            table[f"ours on the same ({name.partition(',')[2].strip()})"] = ours
    return table
