"""Whether the model ranks layouts as measurements do: sets of one model, cluster and batch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.accuracy.fields import compiled, deepcompile
from benchmarks.accuracy.strata import grouped
from benchmarks.accuracy.throughput import Result

Key = tuple[object, ...]
FEWEST = 3
"""Layouts of a set."""
NOISE = 0.10
"""Difference of a row from other measurements of the same layout beyond which no model can be right about both."""


@dataclass(frozen=True)
class RankedSet:
    """Layouts of one model, cluster and batch."""

    name: str
    layouts: int
    regret: float
    """Measured step time of the layout that the model ranks first over the best measured one, less one."""
    spearman: float
    contradicted: tuple[str, ...] = ()
    """Rows that other measurements of their own layout contradict by more than ``NOISE``."""


def ranked_sets(results: Iterable[Result]) -> list[RankedSet]:
    """Repeated measurements of a layout are averaged; sets of fewer layouts are left out."""
    known = [result for result in results if result.relative_error is not None and not result.excluded]
    doubtful, ranked = contradicted(known), []
    for key, rows in _grouped(known, _set_key).items():
        layouts = _grouped(rows, _layout_key).values()
        if len(layouts) >= FEWEST:
            measured = [statistics.mean(row.measured_s or 0.0 for row in same) for same in layouts]
            predicted = [statistics.mean(row.predicted_s or 0.0 for row in same) for same in layouts]
            regret = measured[predicted.index(min(predicted))] / min(measured) - 1
            wrong = tuple(row.row["id"] for same in layouts for row in same if row.row["id"] in doubtful)
            name = " ".join(map(str, key))
            ranked.append(RankedSet(name, len(layouts), regret, spearman(measured, predicted), wrong))
    return ranked


def _grouped(results: Iterable[Result], key: Callable[[Result], Key]) -> dict[Key, list[Result]]:
    return grouped((key(result), result) for result in results)


@dataclass(frozen=True)
class Choice:
    """Engines, or eager and compiled runs of one engine, that measured the same job."""

    name: str
    predicted_first: str
    measured_first: str
    regret: float
    """Measured step time of the one predicted to be the fastest over the best measured one, less one."""


def engine_choices(results: Iterable[Result]) -> list[Choice]:
    """Of each job that at least two ran, each by its best layout."""
    known = [each for each in results if each.relative_error is not None and not each.excluded and each.assumed is None]
    found = []
    for key, rows in _grouped(known, _set_key).items():
        if len({_variant(row) for row in rows}) > 1:
            ours = min(rows, key=lambda row: row.predicted_s or 0.0)
            best = min(rows, key=lambda row: row.measured_s or 0.0)
            regret = (ours.measured_s or 0.0) / (best.measured_s or 1.0) - 1
            found.append(Choice(" ".join(map(str, key)), ", ".join(_variant(ours)), ", ".join(_variant(best)), regret))
    return found


def contradicted(results: Iterable[Result]) -> dict[str, float]:
    """Id → how far a row lies from the median of the others of its layout, where that is more than ``NOISE``.

    No prediction enters: measured seconds are compared for each slot of a micro batch, m + (p−1)/v of them in a step
    (a step's own part, data parallelism and optimizer, is a few per cent). At least two other measurements of a layout,
    repeated or at another batch size, are needed.
    """

    def layout(result: Result) -> Key:
        key = [part for part in _set_key(result) if not str(part).startswith("batch ")]
        program = result.run.execution if result.run else None  # tells variants of the code apart
        return (*key, *_layout_key(result), result.row["job"].get("dp"), program)

    found = {}
    for rows in _grouped((result for result in results if result.counted), layout).values():
        for row in rows if len(rows) > 2 else ():
            others = statistics.median(_slot_s(other) for other in rows if other is not row)
            difference = _slot_s(row) / others - 1
            if abs(difference) > NOISE:
                found[row.row["id"]] = difference
    return found


def _slot_s(result: Result) -> float:
    layout = result.ran.layout
    return (result.measured_s or 0.0) / (layout.gradient_accumulation_steps + (layout.pp - 1) / layout.vp)


def spearman(left: list[float], right: list[float]) -> float:
    """Rank correlation; ties share their mean rank. 0 where one side is all ties."""
    ranks = [_ranks(left), _ranks(right)]
    return statistics.correlation(*ranks) if all(len({*values}) > 1 for values in ranks) else 0.0


def _ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [statistics.mean(index for index, other in enumerate(ordered) if other == value) for value in values]


def _set_key(result: Result) -> Key:
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
        (row.get("code") or {}).get("name", ""),
    )


def _variant(result: Result) -> tuple[str, str]:
    """What runs a job: the engine, and whether eager or compiled, by torch or by DeepSpeed."""
    how = "DeepCompile" if deepcompile(result.row) else "compiled" if compiled(result.row) else "eager"
    stage = result.row["job"].get("zero_stage")
    return f"{result.row['job']['engine']}{f' ZeRO-{stage}' if stage else ''}", how


def _layout_key(result: Result) -> Key:
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
    program = result.run.execution if result.run else None
    return (
        *(str(job.get(size)) for size in sizes),  # offload may be an object
        program and (program.graphs, program.once_per_node, program.overlaps_experts, program.overlaps_gradients),
        *_variant(result),
    )
