"""The largest model that some GPUs can train: all weights, LoRA and QLoRA, with GPU memory, host memory and disk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kit.cost.hardware import usable_gib
from kit.cost.memory.peak import MemoryReport, peak
from kit.cost.model.params import count
from kit.errors import PlanError
from kit.planner.fallbacks import without_loss
from kit.planner.request import Request
from kit.planner.search import search
from kit.planner.sweep import Variant, sweep
from kit.specs.catalog import load_model
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec, LoraSpec
from kit.specs.layout import Pins, describe
from kit.units import human_count

SIZES = (
    "qwen2.5-0.5b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-3.1-70b",
    "mistral-large-2407", "llama-3.1-405b",
)  # fmt: skip
"""Decoders of the catalog, one of each usual size, ascending."""
WAYS: dict[str, LoraSpec | None] = {"full": None, "LoRA": LoraSpec(), "QLoRA": LoraSpec(four_bit=True)}


@dataclass(frozen=True, kw_only=True)
class FittingModel:
    """A model that fits, trained in one way, as ``kit memory --largest --json`` prints it."""

    model: str
    parameters: int
    way: str
    layout: str
    peak_gib: float
    host_ram_gib_per_node: float
    nvme_gib_per_node: float


def largest_models(cluster: ClusterSpec, job: JobSpec, pins: Pins) -> list[FittingModel]:
    """Plans each model size with each training method, until one does not fit without loss of accuracy. Raises
    ``PlanError`` if none fits."""
    found: list[FittingModel] = []
    for way, lora in WAYS.items():
        asked = partial(Request, cluster=cluster, job=replace(job, lora=lora), pins=without_loss(pins))
        variants = (Variant(name, asked(model=load_model(name))) for name in SIZES)
        outcomes = itertools.takewhile(lambda each: each.found, sweep(variants, _memory))
        found += [_fitting(each.variant.request, way, each.found) for each in outcomes if each.found]
    if not found:
        raise PlanError(f"no model of {SIZES[0]} or larger fits on {cluster.num_gpus} x {cluster.gpu.name}")
    return found


def _memory(variant: Variant) -> MemoryReport | None:
    """Memory of the fastest layout, without the reasons of a plan."""
    best = search(variant.request).best
    return best and peak(variant.request.workload(best.layout))


def _fitting(request: Request, way: str, memory: MemoryReport) -> FittingModel:
    return FittingModel(
        model=request.model.name,
        parameters=count(request.model).total,
        way=way,
        layout=describe(memory.layout),
        peak_gib=memory.peak_gib,
        host_ram_gib_per_node=memory.host_ram_gib_per_node,
        nvme_gib_per_node=memory.nvme_gib_per_node,
    )


def table(cluster: ClusterSpec, job: JobSpec, found: Sequence[FittingModel]) -> str:
    """A text table, one row per model: GiB per GPU, host memory and disk per node; then the layout of the largest."""
    limits = [f"{usable_gib(cluster.gpu):.1f} GiB usable a GPU"]
    of_a_node = (("host memory", cluster.host_ram_gib), ("NVMe", cluster.nvme_gib))
    limits += [f"{gib:,.0f} GiB of {name} a node" for name, gib in of_a_node if gib]
    largest = {each.way: each for each in found}  # they ascend
    lines = [
        f"{cluster.num_gpus} x {cluster.gpu.name} ({cluster.name}); {job.precision}, sequences of {job.seq_length}, "
        f"{job.global_batch_size} a step",
        f"  {', '.join(limits)}",
        "",
        f"{'':<34}" + "".join(f"{way:>24}" for way in WAYS),
        f"  {'model':<20}{'parameters':>12}" + f"{'GPU    host    disk':>24}" * len(WAYS) + "   GiB",
        *_rows(found),
        "",
        *(
            f"largest, {way}: " + (f"{largest[way].model}: {largest[way].layout}" if way in largest else "none")
            for way in WAYS
        ),
    ]
    return "\n".join(lines)


def _rows(found: Sequence[FittingModel]) -> Iterator[str]:
    """One for each that fits in any way, and for the first that fits in none."""
    fitting = {(each.model, each.way): each for each in found}
    for name in SIZES:
        cells = [_cell(fitting.get((name, way))) for way in WAYS]
        yield f"  {name:<20}{human_count(count(load_model(name)).total):>12}" + "".join(f"{cell:>24}" for cell in cells)
        if not any((name, way) in fitting for way in WAYS):
            return


def _cell(fits: FittingModel | None) -> str:
    if fits is None:
        return "does not fit"
    return f"{fits.peak_gib:.1f} {fits.host_ram_gib_per_node:>7,.0f} {fits.nvme_gib_per_node:>7,.0f}"
