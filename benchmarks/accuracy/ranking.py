"""Whether the model ranks layouts as measurements do: sets of one model, cluster and batch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.accuracy.throughput import Result

FEWEST = 3
"""Layouts of a set."""


@dataclass(frozen=True)
class RankedSet:
    """Layouts of one model, cluster and batch."""

    name: str
    layouts: int
    regret: float
    """Measured step time of the layout that the model ranks first over the best measured one, less one."""
    spearman: float


def ranked_sets(results: Iterable[Result]) -> list[RankedSet]:
    """Repeated measurements of a layout are averaged; sets of fewer layouts are left out."""
    sets: dict[tuple[object, ...], dict[tuple[object, ...], list[Result]]] = {}
    for result in results:
        if result.relative_error is None or result.excluded:
            continue
        sets.setdefault(_set_key(result), {}).setdefault(_layout_key(result), []).append(result)
    ranked = []
    for key, layouts in sets.items():
        if len(layouts) < FEWEST:
            continue
        measured = [statistics.mean(row.measured_s or 0.0 for row in rows) for rows in layouts.values()]
        predicted = [statistics.mean(row.predicted_s or 0.0 for row in rows) for rows in layouts.values()]
        first = measured[predicted.index(min(predicted))]
        ranked.append(
            RankedSet(" ".join(map(str, key)), len(layouts), first / min(measured) - 1, spearman(measured, predicted))
        )
    return ranked


def spearman(left: list[float], right: list[float]) -> float:
    """Rank correlation; ties share their mean rank."""
    ranks = [_ranks(left), _ranks(right)]
    means = [statistics.mean(values) for values in ranks]
    parts = [[value - mean for value in values] for values, mean in zip(ranks, means, strict=True)]
    scale = (sum(value**2 for value in parts[0]) * sum(value**2 for value in parts[1])) ** 0.5
    return sum(a * b for a, b in zip(*parts, strict=True)) / scale if scale else 0.0


def _ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [statistics.mean(index for index, other in enumerate(ordered) if other == value) for value in values]


def _set_key(result: Result) -> tuple[object, ...]:
    row = result.row
    model, cluster = row["model"], row["cluster"]
    precision = str(row["job"].get("precision")).split(" ")[0]
    return (
        result.source,
        model.get("name"),
        f"h{model.get('num_attention_heads')}",
        f"{cluster.get('num_gpus')}x{cluster.get('gpu')}",
        f"s{model.get('seq_length')}",
        f"batch {row['job'].get('global_batch_size')}",
        precision,
        "LoRA" if row["job"].get("lora") else "",
    )


def _layout_key(result: Result) -> tuple[object, ...]:
    job = result.row["job"]
    sizes = (
        "engine",
        "zero_stage",
        "tp",
        "pp",
        "vp",
        "cp",
        "ep",
        "etp",
        "sp",
        "micro_batch_size",
        "recompute",
        "offload",
    )
    program = result.run.program if result.run else None
    own = (
        result.row["id"] if result.source in ("xtuner", "dcomp") else None
    )  # variants that the columns do not tell apart
    return (*(job.get(size) for size in sizes), program and program.graphs, program and program.once_per_node, own)
