"""Errors by stratum, weighted so that every group of rows counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.accuracy.fields import offload_of, optimizer_of, program_of
from benchmarks.accuracy.memory import Result

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Errors:
    """Summary of relative errors, in which each group of rows has the same weight."""

    rows: int
    groups: int
    median_absolute: float
    p90_absolute: float
    signed_mean: float


def errors_of(pairs: Iterable[tuple[str, float]]) -> Errors | None:
    """``pairs`` of (group, relative error); null without any."""
    signed = weighted(pairs)
    if not signed:
        return None
    absolute, groups = sorted((abs(error), weight) for error, weight in signed), sum(weight for _, weight in signed)
    return Errors(
        rows=len(signed),
        groups=round(groups),
        median_absolute=quantile(absolute, 0.5),
        p90_absolute=quantile(absolute, 0.9),
        signed_mean=sum(error * weight for error, weight in signed) / groups,
    )


def weighted(pairs: Iterable[tuple[str, float]]) -> list[tuple[float, float]]:
    """``pairs`` of (group, value) as (value, weight), sorted; each group weighs one."""
    pairs = list(pairs)
    sizes = Counter(group for group, _ in pairs)
    return sorted((value, 1 / sizes[group]) for group, value in pairs)


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """``pairs`` of (key, value) as key → values."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def errors_by(chosen: Mapping[str, Iterable[tuple[str, float]]]) -> dict[str, Errors]:
    """``errors_of`` each stratum; those without any are left out."""
    table = {name: errors_of(pairs) for name, pairs in chosen.items()}
    return {name: errors for name, errors in table.items() if errors is not None}


def quantile(weighted: list[tuple[float, float]], share: float) -> float:
    """The value below which ``share`` of the weight lies, of sorted pairs of value and weight."""
    total, seen = sum(weight for _, weight in weighted), 0.0
    for value, weight in weighted:
        seen += weight
        if seen >= share * total - 1e-9:
            return value
    return weighted[-1][0]


def size_class(result: Result) -> str:
    """By what was measured."""
    if result.statistic == "allocated":
        return "end of step"
    if result.measured_gib > 4:
        return "above 4 GiB"
    return "1 to 4 GiB" if result.measured_gib >= 1 else "below 1 GiB"


HEADLINES: dict[str, Callable[[Result], bool]] = {
    "peak above 4 GiB": lambda result: size_class(result) == "above 4 GiB",
    "peak 1 to 4 GiB": lambda result: size_class(result) == "1 to 4 GiB",
    "states, Megatron, end of step": lambda result: (
        result.statistic == "allocated" and result.row["job"]["engine"] == "megatron"
    ),
}
"""The figures that limits are set for."""


def strata(results: list[Result]) -> dict[str, Errors]:
    """Headlines, then each dimension of peaks above 1 GiB."""
    counted = [result for result in results if not result.excluded and result.predicted_gib is not None]
    peaks = [result for result in counted if size_class(result) in ("above 4 GiB", "1 to 4 GiB")]
    every = sorted({label for result in peaks for label in labels(result)})
    table = {name: [result for result in counted if chosen(result)] for name, chosen in HEADLINES.items()}
    table |= {label: [result for result in peaks if label in labels(result)] for label in every}
    return errors_by({name: own_errors(some) for name, some in table.items()})


def own_errors(results: Iterable[Result]) -> list[tuple[str, float]]:
    """Pairs for ``errors_of``."""
    return [(result.row["group"], result.relative_error or 0.0) for result in results]


def too_low(results: list[Result]) -> str:
    """How many counted figures are predicted more than 15 % too low: the error that costs a place in a queue."""
    errors = [result.relative_error for result in results if not result.excluded and result.relative_error is not None]
    low = sum(error < -0.15 for error in errors)
    return f"{low} of {len(errors)} figures ({low / max(len(errors), 1):.1%}) are predicted more than 15 % too low"


def labels(result: Result) -> list[str]:
    """The strata that a peak belongs to."""
    model, job = result.row["model"], result.row["job"]
    optimizer, offload = optimizer_of(job), offload_of(job)
    sharded = job["engine"] == "fsdp" and not job.get("transformer_impl")
    features = {
        f"FSDP of {program_of(result.row)}'s layers": sharded,
        "compiled": job.get("compile"),
        "moments in 16 bits or fewer": optimizer.moment_bytes,
        "step in backward": optimizer.in_backward,
        "offload of activations": offload.activations,
        "offload of the optimizer": offload.optimizer or optimizer.paged,
    }
    return [
        *(name for name, present in features.items() if present),
        f"engine {job['engine']}, {size_class(result)}",
        "experts" if model.get("moe") else "dense",
        f"recompute {job.get('recompute') or 'unstated'}",
        "context parallel" if (job.get("cp") or 1) > 1 else "no context parallel",
        "pipeline" if (job.get("pp") or 1) > 1 else "no pipeline",
        "fp8" if job.get("fp8") else "no fp8",
        "LoRA" if job.get("lora") else "no LoRA",
    ]
