"""Error bands of plans: errors on published runs of the same kind, with constants fitted without the run's source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.accuracy.strata import grouped, quantile, weighted
from benchmarks.accuracy.throughput import Result
from benchmarks.accuracy.throughput_strata import BLACKWELL, generation
from kit.cost.time.elementwise import LOW_PRECISIONS

HEAD = """\
# Bands of step-time predictions by the code that runs: 80 % of published rows of the kind, predicted without
# their own source, lie within; where they are few for a band, all of them. Generated:
# python -m benchmarks.accuracy throughput --data {source} --bands FILE

"""
FEW = "  few: true\n"
SHARE = 0.8
"""Share of the rows within a band."""
FEWEST_GROUPS = 2
FEWEST_ROWS = 12
"""Fewest rows of a band, because a quantile of fewer says little. With fewer rows the worst error is reported."""


@dataclass(frozen=True)
class Band:
    """The band of one regime: code, engine, dense or with experts."""

    regime: str
    rows: int
    groups: int
    width: float
    """Smallest relative error that ``SHARE`` of the rows stay below."""
    holds: float
    """Share of rows within."""
    by_group: float
    """Width if each group of rows has the same weight. It shows when many similar rows decide the band."""
    median: float
    few: bool
    """Whether there are too few rows or groups for a band: ``width`` is the worst error then."""


def regimes(result: Result) -> tuple[str, ...]:
    """Regimes of a row, ``code, engine, dense|experts``. Old Megatron without fused kernels, offload and LoRA have
    their own. Rows in 8 or 4 bits also count in a regime of their precision.

    With enough rows, Transformer Engine is also split by GPU generation: Blackwell's rates come from one source only,
    and without that source Hopper's are used.
    """
    whole, run = _regime(result), result.ran
    if run.offloads:
        return (f"{whole}, offload",)
    if run.lora is not None:
        return (f"{whole}, LoRA",)
    found = [whole, f"{whole}, fp8"] if run.execution.precision in LOW_PRECISIONS else [whole]
    if whole.startswith("transformer_engine"):
        found.append(f"{whole}, {'Blackwell' if generation(result) in BLACKWELL else 'up to Hopper'}")
    return tuple(found)


def _regime(result: Result) -> str:
    run, how, engine = result.ran, result.ran.execution, result.row["job"]["engine"]
    megatrons = {"megatron-local": "megatron before fused attention", "transformer_engine": "transformer_engine"}
    name = megatrons.get(run.implementation, f"other programs with {engine}")
    if run.implementation not in megatrons and engine == "megatron":
        early = ", attention of several operators" if how.attention == "unfused" else ""
        norms = ", norms of several operators" if how.code == "huggingface" else ""
        name = f"torch's kernels with megatron{norms}{early}"
    elif engine == "deepspeed" and how.code == "huggingface":
        name = "huggingface with deepspeed"
    return f"{name}, {'experts' if run.model.num_experts else 'dense'}"


def bands(results: Iterable[Result], errors: dict[str, float]) -> list[Band]:
    """By regime, all rows of Ampere and later."""
    counted = [result for result in results if result.counted and generation(result) != "GH200-96"]
    rows = grouped((name, result) for result in counted for name in regimes(result))
    return [_band(name, own, errors) for name, own in sorted(rows.items())]


def _band(name: str, own: list[Result], errors: dict[str, float]) -> Band:
    by_group = weighted((result.group, abs(errors[result.row["id"]])) for result in own)
    groups, by_row = len({result.group for result in own}), [(error, 1.0) for error, _ in by_group]
    few = groups < FEWEST_GROUPS or len(own) < FEWEST_ROWS
    width = round(by_row[-1][0] if few else quantile(by_row, SHARE), 3)
    within = sum(error <= width + 5e-4 for error, _ in by_row) / len(own)
    return Band(name, len(own), groups, width, within, quantile(by_group, SHARE), quantile(by_row, 0.5), few)


def as_yaml(found: list[Band], source: str) -> str:
    """``kit/specs/catalog/bands.yaml``."""
    return HEAD.format(source=source) + "".join(
        f'"{band.regime}":\n  width: {band.width:.3f}\n  rows: {band.rows}\n  groups: {band.groups}\n'
        f"  holds: {band.holds:.3f}\n{FEW * band.few}"
        for band in found
    )
