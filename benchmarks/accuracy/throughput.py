"""Each throughput row's step time, predicted; and why a row is left out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from benchmarks.accuracy.cleaned import contradiction, number_of, with_sizes
from benchmarks.accuracy.fields import mean_length
from benchmarks.accuracy.pipelines import NotPredictedError, Row
from benchmarks.accuracy.programs.memory import memory_of
from benchmarks.accuracy.programs.published import PublishedWorkload
from benchmarks.accuracy.programs.step_time import PublishedStepTime
from benchmarks.accuracy.throughput_rows import run_of, transformers_only, with_recompute
from kit.cost.hardware import gpu_perf
from kit.units import to_gib

MARKS = ("SOURCE INCONSISTENT", "SUSPECT LAYOUT", "INCONSISTENT SOURCE", "PARTIAL ROW")
"""Words in a row's notes after which it enters no error figure."""
ASSUMED_MODES = ("none", "selective", "full")
"""Recompute modes of which the fastest that fits is assumed where a row states none."""
ASSUMED_MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Result:
    """One row, predicted or left out."""

    row: Row
    measured_s: float | None
    predicted_s: float | None
    components_s: dict[str, float]
    run: PublishedWorkload | None
    assumed: str | None
    """What the row does not state and the prediction assumes; such rows have a stratum of their own."""
    excluded: str | None
    skipped: str | None

    @property
    def ran(self) -> PublishedWorkload:
        """The run of a row that is predicted."""
        assert self.run is not None
        return self.run

    @property
    def relative_error(self) -> float | None:
        """Predicted over measured, less one."""
        return None if self.predicted_s is None or not self.measured_s else self.predicted_s / self.measured_s - 1

    @property
    def counted(self) -> bool:
        """Whether the row enters the headline figures."""
        return self.relative_error is not None and self.excluded is None and self.assumed is None

    @property
    def group(self) -> str:
        """Rows of one source table and model, which weigh one together."""
        return str(self.row.get("split_group") or self.row["id"])

    @property
    def source(self) -> str:
        """The source table, which leave-one-out leaves out as a whole."""
        return self.group.split(":")[0]


def measured_step_s(row: Row) -> float | None:
    """The step time, or the one that tokens/s or TFLOP/s imply (the file's own ``check``)."""
    measured, job, model = row["measured"], row["job"], row["model"]
    if stated := number_of(measured.get("step_time_s")):
        return stated
    values = (job.get("global_batch_size"), model.get("seq_length"), row["cluster"].get("num_gpus"))
    speed, batch, sequence, gpus = map(number_of, (measured.get("tokens_per_s_per_gpu"), *values))
    if speed and batch and sequence and gpus:
        return batch * sequence / (speed * gpus)
    return number_of((row.get("check") or {}).get("implied_step_time_s"))


def result_of(row: Row) -> Result:
    """Never raises: what cannot be predicted says why."""
    if row["model"].get("seq_length"):
        row = {**row, "model": {**row["model"], "seq_length": mean_length(row)}}
    measured = measured_step_s(row)
    notes = str(row.get("notes") or "")
    marks = [*(mark for mark in MARKS if mark in notes), *(["suspect"] if row.get("suspect") else [])]
    excluded = f"marked {marks[0]}" if marks else contradiction(row)
    try:
        if row.get("damaged"):
            raise NotPredictedError(f"damaged: {row['damaged']}")
        if measured is None:
            raise NotPredictedError("neither a step time nor what implies one is published")
        transformers_only(row)
        run, assumed = _run(with_sizes(row))
        components = components_s(run)
    except NotPredictedError as error:
        return Result(row, measured, None, {}, None, None, excluded, str(error))
    except (LookupError, ValueError, TypeError, ArithmeticError, AttributeError) as error:
        return Result(row, measured, None, {}, None, None, excluded, f"sizes that do not fit together: {error!r}")
    return Result(row, measured, sum(components.values()), components, run, assumed, excluded, None)


def components_s(run: PublishedWorkload, matmul: float = 1.0) -> dict[str, float]:
    """Seconds by component. ``matmul``: factor on the catalog's rate of GEMMs."""
    how = run.execution
    try:
        gpu = gpu_perf(run.cluster, how.precision, how.attention, how.linear_layers_only)
    except KeyError:
        raise NotPredictedError(f"no rate of {how.precision} on {run.cluster.gpu.name}") from None
    # Head and experts that stay in 16 bits keep their rate.
    faster = gpu.matmul._replace(flops_per_s=gpu.matmul.flops_per_s * how.matmul_share * matmul)
    gpu = gpu._replace(matmul=faster, others=faster if gpu.others == gpu.matmul else gpu.others)
    return PublishedStepTime(gpu).components_s(run)


def _run(row: Row) -> tuple[PublishedWorkload, str | None]:
    """The row's run; where it leaves recompute or the micro batch open, the fastest that fits, and the words for it."""
    job = {**row["job"], "recompute": _stated_mode(row["job"].get("recompute"))}
    row = {**row, "job": job}
    if job.get("recompute") is not None and job.get("micro_batch_size") is not None:
        return run_of(row), None
    share = max(1, (job.get("global_batch_size") or 1) // (job.get("dp") or 1))
    sizes = (
        [job["micro_batch_size"]]
        if job.get("micro_batch_size")
        else [n for n in ASSUMED_MICRO_BATCHES if share % n == 0]
    )
    modes = [job["recompute"]] if job.get("recompute") is not None else list(ASSUMED_MODES)
    # GiB that are lacking, what decides on memory, seconds, the run, its words.
    tried: list[tuple[float, tuple[int, str], float, PublishedWorkload, str]] = []
    for size, vp in itertools.product(sizes, _interleavings(row)):
        try:
            base = run_of({**row, "job": {**job, "micro_batch_size": size, "recompute": "none", "vp": vp}})
        except IndexError:
            continue
        for mode in modes:
            run = with_recompute(base, mode)
            words = f"micro batch {size}, recompute {mode}" + (f", vp {vp}" if vp != job.get("vp") else "")
            tried.append((_over_gib(run), (size, mode), sum(components_s(run).values()), run, words))
    # It did run. Where nothing fits, what comes nearest was run, with the interleaving that is best for it.
    _, nearest, *_ = min(tried, key=itemgetter(0))
    likely = [each for each in tried if each[0] <= 0] or [each for each in tried if each[1] == nearest]
    *_, run, words = min(likely, key=itemgetter(2))
    return run, words


def _stated_mode(words: Any) -> str | None:
    """Words that name a mode; null where they leave it open."""
    known = words is not None and str(words).lower().startswith(ASSUMED_MODES)
    return "none" if str(words).lower() in ("false", "no", "off", "0") else str(words) if known else None


def _interleavings(row: Row) -> list[int | None]:
    """Virtual stages: as stated; any that divide the layers where the notes say that they are not published."""
    job, notes = row["job"], str(row.get("notes") or "").lower()
    pp, layers = job.get("pp") or 1, row["model"].get("num_layers") or 1
    if job.get("vp") or pp == 1 or "not published" not in notes or not ("virtual" in notes or "vp" in notes):
        return [job.get("vp")]
    units = layers if layers % pp == 0 else layers + 2
    return [vp for vp in range(1, 9) if units % (pp * vp) == 0] or [None]


def _over_gib(run: PublishedWorkload) -> float:
    """Predicted peak less the GPU's memory."""
    if run.implementation == "huggingface":
        run = replace(run, implementation="torchtitan")  # plans alone describe DeepSpeed's memory; this comes nearest
    peaks = (memory_of(run, stage).peak for stage in {0, run.layout.pp - 1})
    return max(to_gib(sum(peak.values())) for peak in peaks) - run.cluster.gpu.memory_gib


def as_row(result: Result) -> dict[str, Any]:
    """The row of ``--json``."""
    return {
        "id": result.row["id"],
        "split_group": result.row.get("split_group"),
        "measured_step_time_s": result.measured_s,
        "predicted_step_time_s": result.predicted_s,
        "relative_error": result.relative_error,
        "skipped": result.skipped or (f"not counted: {result.excluded}" if result.excluded else None),
        "assumed": result.assumed,
        "components_s": result.components_s,
    }
