"""Errors of step times by stratum, a constant-MFU baseline beside them, and the same with each source left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from benchmarks.accuracy.programs.published import PublishedWorkload
from benchmarks.accuracy.strata import Errors, errors_by, quantile, weighted
from benchmarks.accuracy.throughput import Result, components_s
from kit.cost.hardware import gpu_rates, peak_flops_per_s
from kit.cost.model.flops import model_flops_per_token
from kit.cost.time.elementwise import LOW_PRECISIONS

GRID = tuple(0.70 + 0.02 * step for step in range(36))
"""Factors tried where a constant is estimated again."""
BLACKWELL = ("B200", "B300", "GB200", "GB300")


def generation(result: Result) -> str:
    """Generation of the GPU. Models with limits of their own count separately."""
    name = str(result.row["cluster"].get("gpu"))
    hopper = name in ("H100", "H200", "H800")
    return "Hopper" if hopper else "Ampere" if name.startswith(("A100", "A800")) else name


def kind(result: Result) -> str:
    """A generation of GPUs and what its GEMMs run in."""
    precision = result.ran.execution.precision
    return f"{generation(result)} {'bf16/fp16' if precision in ('bf16', 'fp16') else precision}"


def headline(result: Result) -> bool:
    """Megatron's dense rows in 16 bits."""
    return (
        result.row["job"]["engine"] == "megatron"
        and result.row["model"].get("moe") is None
        and result.ran.execution.precision in ("bf16", "fp16")
    )


def labels(result: Result) -> list[str]:
    """The strata of a row."""
    job, layout = result.row["job"], result.ran.layout
    return [
        f"engine {job['engine']}",
        f"GPU {kind(result)}",
        "experts" if result.ran.model.num_experts else "dense",
        f"recompute {layout.recompute}",
        "pipeline" if layout.pp > 1 else "no pipeline",
        "context parallel" if layout.cp > 1 else "no context parallel",
        "LoRA" if result.ran.lora else "all weights trained",
        *([f"file {result.row['file']}"] if "file" in result.row else []),
    ]


def strata(results: Iterable[Result], error: Callable[[Result], float] | None = None) -> dict[str, Errors]:
    """Headlines, rows with assumptions, then each dimension of all counted rows."""
    results = list(results)
    counted = [result for result in results if result.counted]
    assumed = [
        result for result in results if result.assumed and result.relative_error is not None and not result.excluded
    ]
    chosen: dict[str, list[Result]] = {
        "Megatron dense bf16/fp16": [result for result in counted if headline(result)],
        "all rows": counted,
        "assumed: recompute or micro batch not stated, H100 and later": [
            result for result in assumed if generation(result) == "Hopper" or generation(result) in BLACKWELL
        ],
        "assumed: recompute or micro batch not stated, others": [
            result for result in assumed if not (generation(result) == "Hopper" or generation(result) in BLACKWELL)
        ],
    }
    for label in sorted({label for result in counted for label in labels(result)}):
        chosen[label] = [result for result in counted if label in labels(result)]
    measure = error or (lambda result: result.relative_error or 0.0)
    return errors_by({name: [(result.group, measure(result)) for result in rows] for name, rows in chosen.items()})


# ---------------------------------------------------------------- a constant MFU


def constant_mfu_errors(results: Iterable[Result]) -> dict[str, float]:
    """Id → error of a prediction by one MFU per GPU generation and precision, the one with the least median error."""
    results = [result for result in results if result.relative_error is not None and not result.excluded]
    ideal = {result.row["id"]: _ideal_s(result) for result in results}
    errors: dict[str, float] = {}
    for name in {kind(result) for result in results}:
        of_kind = [result for result in results if kind(result) == name]
        counted = [result for result in of_kind if result.counted] or of_kind
        ratios = ((result.group, (result.measured_s or 1.0) / ideal[result.row["id"]]) for result in counted)
        constant = quantile(weighted(ratios), 0.5)
        errors |= {
            result.row["id"]: constant * ideal[result.row["id"]] / (result.measured_s or 1.0) - 1 for result in of_kind
        }
    return errors


def _ideal_s(result: Result) -> float:
    """FLOPs (causal, a third more with full recompute) at the data sheet's peak."""
    layout, s = result.ran.layout, result.ran.job.seq_length
    flops = model_flops_per_token(result.ran.model, s) * (4 / 3 if layout.recompute == "full" else 1.0)
    peak = peak_flops_per_s(result.ran.cluster.gpu, result.ran.execution.precision)
    return flops * layout.global_batch_size * s / layout.world_size / peak


# ---------------------------------------------------------------- leave one source out

POOLED = "16 bits, and Hopper's fp8"
"""Kinds whose rates in the catalog are one constant times a table of single GEMMs: a training step sustains 0.855 of
what the best shapes reach (A100 0.869 of its peak, H100 0.803, and 0.709 in fp8: stas00/ml-engineering,
compute/accelerator), within 1 %. That share alone is estimated from rows."""
SUSTAINED = 0.855
BEST_SHAPES = {"B200": 0.763, "B300": 0.745, "GB200": 0.723, "GB300": 0.745}
"""Share of the fp8 peak that the best shapes reach, from the same table; GB300 is not in it and has B300's chip."""
ONE_SOURCE = {"GH200-96": "sailor", "H100-96GB-HBM2e-500W": "titan"} | dict.fromkeys(BLACKWELL, "nv")
"""GPUs whose rates were estimated from one source; on Blackwell those in 8 and 4 bits."""


def constant(result: Result) -> str:
    """Rows that share one estimated rate of GEMMs."""
    gpu, precision = kind(result).split(" ", 1)
    alone = gpu in ONE_SOURCE and not (gpu in BLACKWELL and precision == "bf16/fp16")
    return kind(result) if alone else POOLED


def without_own_source(results: Iterable[Result]) -> dict[str, float]:
    """Id → error when every constant estimated from rows is estimated from all other sources."""
    results = [result for result in results if result.relative_error is not None and not result.excluded]
    errors: dict[str, float] = {}
    fits = {result.row["id"]: _times(result) for result in results if result.counted}
    for source in sorted({result.source for result in results}):
        others = [result for result in results if result.source != source and result.counted]
        factors = {name: _estimated(name, others, fits) for name in {POOLED, *map(constant, results)}}
        sustained = factors[POOLED] or 1.0
        for result in (result for result in results if result.source == source):
            factor = sustained
            if constant(result) != POOLED:
                of_others = factors[constant(result)] or sustained * _share_of_single_gemms(result.ran)
                factor = of_others if ONE_SOURCE[generation(result)] == source else 1.0
            seconds = sum(components_s(result.ran, factor).values())
            errors[result.row["id"]] = seconds / (result.measured_s or 1.0) - 1
    return errors


def estimates(results: Iterable[Result]) -> dict[str, dict[str, float]]:
    """Constant → left-out source → factor on the catalog's rate of GEMMs ("none": all rows)."""
    counted = [result for result in results if result.counted]
    fits = {result.row["id"]: _times(result) for result in counted}
    table: dict[str, dict[str, float]] = {}
    for name in sorted(set(map(constant, counted))):
        found = {"none": _estimated(name, counted, fits)}
        for source in sorted({result.source for result in counted if constant(result) == name}):
            found[source] = _estimated(name, [result for result in counted if result.source != source], fits)
        table[name] = {source: factor for source, factor in found.items() if factor is not None}
    return table


def _times(result: Result) -> list[float]:
    """Predicted over measured, less one, at each factor of the grid."""
    return [sum(components_s(result.ran, factor).values()) / (result.measured_s or 1.0) - 1 for factor in GRID]


def _estimated(name: str, rows: list[Result], fits: dict[str, list[float]]) -> float | None:
    """The factor with the least mean absolute error, groups weighing one."""
    own = [result for result in rows if constant(result) == name]
    if not own:
        return None
    sizes = Counter(result.group for result in own)
    costs = [
        sum(abs(math.log1p(fits[result.row["id"]][index])) / sizes[result.group] for result in own)
        for index in range(len(GRID))
    ]
    return GRID[costs.index(min(costs))]


def _share_of_single_gemms(run: PublishedWorkload) -> float:
    """Factor from the catalog's rate to what somebody without rows would take: the best shapes' share on a Blackwell,
    else the share that Hopper reaches."""
    gpu, precision = run.cluster.gpu.name, run.execution.precision
    hopper = gpu_rates("H100").matmul["fp8" if precision in LOW_PRECISIONS else "bf16"]
    share = SUSTAINED * BEST_SHAPES[gpu] if gpu in BEST_SHAPES else hopper
    return share / gpu_rates(gpu).matmul[precision]
