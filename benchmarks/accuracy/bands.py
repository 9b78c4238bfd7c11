"""Bands of plans: how far predictions of rows like a plan lie off, without the rows' own source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.accuracy.throughput import Result
from benchmarks.accuracy.throughput_strata import BLACKWELL, generation
from kit.cost.time.elementwise import LOW_PRECISIONS

SHARE = 0.8
"""Rows that lie within a band."""
FEWEST_GROUPS = 2
FEWEST_ROWS = 12
"""For a regime to have a band of its own: a quantile of fewer says little. Of fewer the worst is told instead."""


@dataclass(frozen=True)
class Band:
    """One regime: whose code, which engine, dense or with experts."""

    regime: str
    rows: int
    groups: int
    width: float
    """Least relative error that ``SHARE`` of the rows stay below."""
    holds: float
    """Share of rows within."""
    by_group: float
    """Width if each group of rows has the same weight. It shows when many similar rows decide the band."""
    median: float
    few: bool
    """Whether there are too few rows or groups for a band: ``width`` is the worst error then."""


def regimes(result: Result) -> tuple[str, ...]:
    """``code, engine, dense|experts``; old Megatron without fused kernels is apart, as are offload and LoRA. Rows in
    8 or 4 bits count for themselves once more.

    Transformer Engine's code, which runs on the most generations of GPUs, is divided once more where rows are enough:
    a Blackwell's rates are known from one source only, and without it they are Hopper's.
    """
    assert result.run is not None
    whole, run = _regime(result), result.run
    if run.offloads:
        return (f"{whole}, offload",)
    if run.lora is not None:
        return (f"{whole}, LoRA",)
    found = [whole, f"{whole}, fp8"] if run.execution.precision in LOW_PRECISIONS else [whole]
    if whole.startswith("transformer_engine"):
        found.append(f"{whole}, {'Blackwell' if generation(result) in BLACKWELL else 'up to Hopper'}")
    return tuple(found)


def _regime(result: Result) -> str:
    assert result.run is not None
    run, how = result.run, result.run.execution
    what = "experts" if run.model.num_experts else "dense"
    if run.implementation == "megatron-local":
        return f"megatron before fused attention, {what}"
    if run.implementation == "transformer_engine":
        return f"transformer_engine, {what}"
    if result.row["job"]["engine"] == "megatron":
        early = ", attention of several operators" if how.attention == "unfused" else ""
        norms = ", norms of several operators" if how.code == "huggingface" else ""
        return f"torch's kernels with megatron{norms}{early}, {what}"
    if result.row["job"]["engine"] == "deepspeed" and how.code == "huggingface":
        return f"huggingface with deepspeed, {what}"
    return f"other programs with {result.row['job']['engine']}, {what}"


def bands(results: Iterable[Result], errors: dict[str, float]) -> list[Band]:
    """By regime, all rows of Ampere and later."""
    rows: dict[str, list[Result]] = {}
    for result in results:
        if result.counted and generation(result) != "GH200-96":
            for name in regimes(result):
                rows.setdefault(name, []).append(result)
    found = []
    for name, own in sorted(rows.items()):
        groups = {result.group for result in own}
        few = len(groups) < FEWEST_GROUPS or len(own) < FEWEST_ROWS
        sizes = {group: sum(result.group == group for result in own) for group in groups}
        weighted = sorted((abs(errors[result.row["id"]]), 1 / sizes[result.group]) for result in own)
        by_row = sorted((abs(errors[result.row["id"]]), 1.0) for result in own)
        width = round(by_row[-1][0] if few else _quantile(by_row, SHARE), 3)
        within = sum(abs(errors[result.row["id"]]) <= width + 5e-4 for result in own) / len(own)
        middle, by_group = _quantile(by_row, 0.5), _quantile(weighted, SHARE)
        found.append(Band(name, len(own), len(groups), width, within, by_group, middle, few))
    return found


def as_yaml(found: list[Band], source: str) -> str:
    """``kit/specs/catalog/bands.yaml``."""
    lines = [
        "# Bands of step-time predictions by the code that runs: 80 % of published rows of the kind, predicted without",
        "# their own source, lie within; where they are few for a band, all of them. Generated:",
        f"# python -m benchmarks.accuracy throughput --data {source} --bands FILE",
        "",
    ]
    for band in found:
        lines += [
            f'"{band.regime}":',
            f"  width: {band.width:.3f}",
            f"  rows: {band.rows}",
            f"  groups: {band.groups}",
            f"  holds: {band.holds:.3f}",
            *["  few: true"] * band.few,
        ]
    return "\n".join(lines) + "\n"


def _quantile(weighted: list[tuple[float, float]], share: float) -> float:
    total, seen = sum(weight for _, weight in weighted), 0.0
    for value, weight in weighted:
        seen += weight
        if seen >= share * total - 1e-9:
            return value
    return weighted[-1][0]
