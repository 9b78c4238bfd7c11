"""Why there is no plan, which layout comes closest, and the cheapest changes that would give one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

from kit.cost.hardware import usable_gib
from kit.cost.memory.offload import HOST_SHARE, host_ram_gib_per_node, nvme_gib_per_node
from kit.cost.memory.peak import peak_gib
from kit.cost.workload import Workload
from kit.errors import HINT
from kit.planner.candidates import all_layouts
from kit.planner.fallbacks import COST_TIME, FALLBACKS
from kit.planner.request import Request
from kit.planner.rules import Violation, violations
from kit.planner.rules.deepspeed import NODE_CAPACITY
from kit.planner.search import Candidate, SearchResult, can_fit, illegal, layouts_with, search, step_s, that_fit
from kit.planner.sweep import Variant, sweep
from kit.specs.catalog import gpu_names, load_gpu, node_names, parse_cluster
from kit.specs.catalog.rows import rows
from kit.specs.cluster import GpuSpec
from kit.specs.job import LoraSpec
from kit.specs.layout import ENGINES, EngineName, Layout, describe, doubled
from kit.units import human_seconds

_MOST_NODES = 1024
"""Largest number of nodes to try."""
_SHORTEST = 512
"""Shortest sequence length that kit proposes, in tokens."""
MOST_CHANGES = 5
"""Most changes that kit proposes."""
_ADAPTERS = {
    "": "adapters",
    "four_bit": "adapters on 4-bit weights",
    "eight_bit": "adapters on 8-bit weights",
}
_MOST_HOST_MEMORY, _MOST_TOLD_GIB, _MOST_DISK_GIB = 8, 4096.0, 16384.0
"""Most host memory that kit proposes: as a multiple of what is there, and where nobody says what is there; and most
disk of a node."""


def nothing_legal(request: Request) -> str:
    """Lists every broken rule of the layout nearest to the pins, for each engine allowed; one a line."""
    reasons = _able(illegal(request))
    # A message that several engines share is printed once.
    lines: dict[str, list[str]] = {}
    for engine, broken in reasons.items():
        for violation in broken:
            lines.setdefault(str(violation), []).append(engine)
    everyone = len(reasons)
    told = [
        message if len(engines) == everyone else f"{' and '.join(engines)}: {message}"
        for message, engines in lines.items()
    ]
    told += _refused_too(request, "\n".join(lines))
    if any(violation.rule == "batch" for broken in reasons.values() for violation in broken):
        told += _batch_divides(request)
    return "\n".join(told)


def _batch_divides(request: Request) -> Iterator[str]:
    """For a batch that does not divide over the GPUs: the nearest batches that divide, and the largest number of GPUs
    over which the batch divides, each with its step time."""
    gpus, batch = request.cluster.num_gpus, request.job.global_batch_size
    for nearest in filter(None, (batch // gpus * gpus, (batch // gpus + 1) * gpus)):
        found = search(replace(request, job=replace(request.job, global_batch_size=nearest))).best
        if found is not None:
            yield f"{HINT}with job.global_batch_size={nearest} it takes {human_seconds(step_s(found))} a step"
    for fewer in request.halved():
        if (found := search(fewer).best) is not None:
            yield f"{HINT}with {fewer.cluster.num_gpus} GPUs it takes {human_seconds(step_s(found))} a step"
            return


def _refused_too(request: Request, told: str) -> Iterator[str]:
    """Engines that a message in ``told`` suggests, but that refuse the same choices for another reason."""
    if request.pins.engine is None:
        return
    for engine in ENGINES:
        if engine != request.pins.engine and f"engine={engine}" in told:
            for broken in illegal(replace(request, pins=request.pins.but(engine=engine)), (engine,)).values():
                yield f"engine={engine} would refuse it too: {broken[0]}"


def _able(reasons: dict[EngineName, tuple[Violation, ...]]) -> dict[EngineName, tuple[Violation, ...]]:
    """Leaves out engines that can never support the pins (such as a split of the model), if another engine can."""
    able = {
        engine: broken
        for engine, broken in reasons.items()
        if not any(violation.rule in ("flag_of_engine", "deepspeed_pipeline") for violation in broken)
    }
    return able or reasons


def nothing_fits(request: Request, result: SearchResult) -> str:
    """The nearest miss in GiB, and the changes that make it fit, the cheapest for the user first."""
    nearest = nearest_miss(request, result.considered)
    if nearest is None:
        return nothing_legal(request)
    cluster = request.cluster
    lines = [
        f"{request.model.name} does not fit on {cluster.num_gpus} x {cluster.gpu.name}: the nearest layout "
        f"({describe(nearest)}) {shortfall(request.workload(nearest))}"
    ]
    lines += [f"{HINT}it fits with {change}" for change in changes_that_fit(request, result.considered)]
    return "\n".join(lines)


class _Cost(IntEnum):
    """What a change costs the user, the cheapest first."""

    NOTHING = 0
    TRAINED = 1
    """Other weights are trained, or by another optimizer."""
    TOLD = 2
    """The memory of the user's machines, which kit does not know."""
    TASK = 3
    """Another batch, or shorter sequences."""
    MEMORY = 4
    GPUS = 5


@dataclass(frozen=True)
class _Change(Variant):
    """A changed request that may have a layout that fits; the label says what to type."""

    kind: str
    """Kind of change. kit names only the smallest change of each kind that helps."""
    cost: _Cost
    factor: float
    """Size of the change: the factor by which a number of the request grows or shrinks; 1 if no number changes."""
    among: Sequence[Layout] | None = None
    """The layouts that the change can make fit; None: any."""
    fallbacks: bool = False
    """Whether last resorts count, because what the change removes may have forbidden one."""


def changes_that_fit(request: Request, considered: Sequence[Candidate], fallbacks: bool = True) -> tuple[str, ...]:
    """Changes after which a layout fits: the cheapest for the user first, among equals the smallest; last of all what
    costs accuracy.

    ``considered``: the legal layouts of the request, none of which fits without a last resort. ``fallbacks``:
    whether they count once a pin is removed, and what costs accuracy is named; after other changes they never count.
    """

    def helps(change: _Change) -> bool:
        return can_fit(change.request, change.among, fallbacks and change.fallbacks)

    found: dict[str, str] = {}
    changes = sorted(_changes(request, considered), key=lambda change: (change.cost, change.factor))
    for outcome in sweep((change for change in changes if change.kind not in found), helps):
        if outcome.found:
            found[outcome.variant.kind] = outcome.variant.label
        if len(found) == MOST_CHANGES:
            break
    return (*found.values(), *_with_loss_of_accuracy(request)) if fallbacks else (*found.values(),)


def _changes(request: Request, considered: Sequence[Candidate]) -> Iterator[_Change]:
    """All changes to try."""
    cluster, pins = request.cluster, request.pins
    for field in fields(pins):
        value = getattr(pins, field.name)
        if value is not None:
            text = f"layout.{field.name} left to the planner instead of {value}"
            free = replace(request, pins=pins.but(**{field.name: None}))
            yield _Change(text, free, field.name, _Cost.NOTHING, 1.0, fallbacks=True)
    yield from _fallbacks_on_the_host(request)
    yield from _other_jobs(request)
    yield from _memory_of_a_node(request)
    yield from _more_gpus(request)
    # Try slower GPUs first: among those with enough memory, the slowest is the most similar to the requested one.
    for gpu in sorted(map(load_gpu, gpu_names()), key=lambda gpu: gpu.bf16_tflops):
        if _is_larger(gpu, cluster.gpu):
            text = f"cluster.gpu={gpu.name} ({gpu.memory_gib:.0f} GiB) instead of {cluster.gpu.name}"
            factor = round(gpu.memory_gib / cluster.gpu.memory_gib, 1)
            larger = replace(request, cluster=replace(cluster, gpu=gpu))
            # Legality does not depend on GPU memory, and a layout does not need less memory on a larger GPU.
            # Those of ``considered`` that fit have a last resort.
            short = (each for each in considered if each.step_time_s is None)
            fitting = [each.layout for each in short if each.peak_gib <= usable_gib(gpu)]
            yield _Change(text, larger, "gpu", _Cost.GPUS, factor, fitting)


def _with_loss_of_accuracy(request: Request) -> Iterator[str]:
    """The last resorts that the search leaves to the user, because more than the engine is pinned."""
    for fallback in itertools.chain.from_iterable(FALLBACKS[1:]):
        if (added := fallback.added_to(request)) is not None and can_fit(added, fallbacks=False):
            given = {name: value for name, value in fallback.pins.items() if getattr(request.pins, name) is None}
            yield f"{' '.join(f'layout.{name}={value}' for name, value in given.items())}, at a loss of accuracy"
            return


def _other_jobs(request: Request) -> Iterator[_Change]:
    job = request.job
    batch, length = job.global_batch_size, job.seq_length

    def change(kind: str, cost: _Cost, factor: float, text: str, **values: Any) -> _Change:
        return _Change(text, replace(request, job=replace(job, **values)), kind, cost, factor)

    for factor in (2, 4, 8):
        larger = factor * batch
        text = f"job.global_batch_size={larger} instead of {batch}"
        yield change("batch", _Cost.TASK, factor, text, global_batch_size=larger)
    for halvings in range(1, (length // _SHORTEST).bit_length()):
        shorter = length >> halvings
        text = f"job.seq_length={shorter} instead of {length}"
        yield change("length", _Cost.TASK, length / shorter, text, seq_length=shorter)
    if job.optimizer.name == "adamw" and job.lora is None:
        text = "job.optimizer.name=adamw-8bit instead of adamw"
        yield change("optimizer", _Cost.TRAINED, 2.0, text, optimizer=replace(job.optimizer, name="adamw-8bit"))
    for four_bit, option, what in ((False, "--lora", _ADAPTERS[""]), (True, "--qlora", _ADAPTERS["four_bit"])):
        if job.lora is None or job.lora.four_bit != four_bit:
            was = f" instead of {_ADAPTERS[job.lora.quantised]}" if job.lora else " trained instead of all weights"
            also = " job.lora.eight_bit=false" if job.lora and job.lora.eight_bit else ""
            text = f"{option} (or job.lora.four_bit={str(four_bit).lower()}{also}): {what}{was}"
            adapters = replace(job.lora or LoraSpec(), four_bit=four_bit, eight_bit=False)
            yield change("lora", _Cost.TRAINED, 1.0 if job.lora else math.inf, text, lora=adapters, balancing=None)
    lora, has_experts = job.lora, request.model.num_experts > 0
    if lora is not None and lora.four_bit and has_experts and not lora.quantize_moe_experts:
        text = "job.lora.quantize_moe_experts=true: experts in 4 bits too"
        yield change("experts", _Cost.TRAINED, 1.0, text, lora=replace(lora, quantize_moe_experts=True))


def _memory_of_a_node(request: Request) -> Iterator[_Change]:
    """The least host memory or disk with which offload fits. A provider's nodes are fixed."""
    cluster, short = request.cluster, _short_of_a_node(request)
    host, disks = cluster.host_ram_gib, cluster.nvme_gib
    needs = [_node_gib(w) for w in map(request.workload, short) if peak_gib(w) <= usable_gib(cluster.gpu)]

    def change(kind: str, cost: _Cost, factor: float, text: str, **values: Any) -> _Change:
        return _Change(text, replace(request, cluster=replace(cluster, **values)), kind, cost, factor, short)

    if hosts := [math.ceil(needed / HOST_SHARE) for needed, disk in needs if disk <= (disks or 0.0)]:
        least = min(hosts)
        if host is None and least <= _MOST_TOLD_GIB:
            text = f"cluster.host_ram_gib={least} for offload, if that is what a node has"
            yield change("host", _Cost.TOLD, 1.0, text, host_ram_gib=float(least))
        elif (
            host
            and host < least <= _MOST_HOST_MEMORY * host
            and not rows("nodes").get(cluster.name, {}).get("provider")
        ):
            text = f"cluster.host_ram_gib={least} instead of {host:.0f}, for offload"
            yield change("host", _Cost.MEMORY, least / host, text, host_ram_gib=float(least))
    there = HOST_SHARE * (host or 0.0)
    on_disks = [math.ceil(disk) for needed, disk in needs if 0 < disk <= _MOST_DISK_GIB and needed <= there]
    if disks is None and on_disks:
        text = f"cluster.nvme_gib={min(on_disks)} for offload to disks, if that is what a node has"
        yield change("nvme", _Cost.TOLD, 2.0, text, nvme_gib=float(min(on_disks)))


def _fallbacks_on_the_host(request: Request) -> Iterator[_Change]:
    """The last resorts that only the host's unknown memory forbids, with the least of it that does."""
    for fallback in COST_TIME if request.cluster.host_ram_gib is None else ():
        told = replace(request, cluster=replace(request.cluster, host_ram_gib=_MOST_TOLD_GIB))
        fitting = [each.layout for each in that_fit(layouts_with(fallback, told))]
        needs = {layout: _node_gib(request.workload(layout))[0] for layout in fitting}
        if layout := min((layout for layout, needed in needs.items() if needed), key=needs.__getitem__, default=None):
            least = math.ceil(needs[layout] / HOST_SHARE)
            text = f"cluster.host_ram_gib={least} for {fallback.what}, if that is what a node has"
            taken = {**fallback.pins} | {name: getattr(layout, name) for name in fallback.steps}
            told = replace(request, cluster=replace(request.cluster, host_ram_gib=float(least)))
            asked = replace(told, pins=told.pins.but(**taken))
            yield _Change(text, asked, "last_resort", _Cost.TOLD, 1.0)


def _more_gpus(request: Request) -> Iterator[_Change]:
    """More GPUs: first all GPUs of a catalog node, then more nodes."""
    cluster = whole = request.cluster
    if cluster.num_nodes == 1 and cluster.name in node_names():
        whole = parse_cluster(f"{cluster.name}:1")
        for gpus in doubled(2 * cluster.gpus_per_node, whole.gpus_per_node):
            share = gpus / cluster.gpus_per_node if cluster.host_ram_gib != whole.host_ram_gib else 1.0
            more = replace(
                cluster,
                gpus_per_node=gpus,
                host_ram_gib=cluster.host_ram_gib and cluster.host_ram_gib * share,
                nvme_gib=cluster.nvme_gib and cluster.nvme_gib * share,
            )
            usual = parse_cluster(f"{gpus}x{cluster.gpu.name}").name == cluster.name
            named = f"cluster={gpus}x{cluster.gpu.name}" if usual else f"{gpus} GPUs of a {cluster.name}"
            text = f"{named} instead of {cluster.num_gpus}"
            yield _Change(text, replace(request, cluster=more), "nodes", _Cost.GPUS, gpus / cluster.num_gpus)
    for nodes in doubled(2 * cluster.num_nodes, _MOST_NODES if cluster.inter_node_gbytes_per_s else 0):
        gpus = nodes * whole.gpus_per_node
        named = f"cluster.num_nodes={nodes}" if whole is cluster else f"cluster={cluster.name}:{nodes}"
        text = f"{named} ({gpus} GPUs) instead of {cluster.num_nodes}"
        more = replace(whole, num_nodes=nodes)
        yield _Change(text, replace(request, cluster=more), "nodes", _Cost.GPUS, gpus / cluster.num_gpus)


def _is_larger(gpu: GpuSpec, own: GpuSpec) -> bool:
    """Whether ``gpu`` has more memory than ``own`` and neither less compute nor less bandwidth."""
    return (
        gpu.device == "cuda"
        and gpu.memory_gib > own.memory_gib
        and gpu.bf16_tflops >= own.bf16_tflops
        and gpu.hbm_gbytes_per_s >= own.hbm_gbytes_per_s
    )


# ---------------------------------------------------------------- the nearest miss


def nearest_miss(request: Request, considered: Iterable[Candidate]) -> Layout | None:
    """The layout that exceeds the memory of GPU or node by the least. Considers legal layouts, and layouts that break
    only the rules of the node's capacity. None if there are none."""
    layouts_short = [*(candidate.layout for candidate in considered), *_short_of_a_node(request)]
    return min(layouts_short, key=lambda layout: _excess(request.workload(layout)), default=None)


def _short_of_a_node(request: Request) -> list[Layout]:
    """Layouts that need host memory or disks, and break only the rules of these. Megatron's are last resorts."""
    engines: tuple[EngineName, ...] = ("torch", "deepspeed")
    return [
        layout
        for engine in engines
        if request.pins.engine in (None, engine)
        for layout in all_layouts(request, engine)
        if (layout.offload_optimizer, layout.offload_param) != ("none", "none") or layout.activation_offloading
        if {violation.rule for violation in violations(request.workload(layout))} <= NODE_CAPACITY
    ]


def _excess(w: Workload) -> tuple[int, list[float]]:
    """Sort key: how many capacities (GPU, host memory, disk) are exceeded, and the ratios of needed to available, the
    largest first. An unknown capacity counts as half of the need."""
    shares = [peak_gib(w) / usable_gib(w.cluster.gpu)]
    for needed, available in zip(
        _node_gib(w), (HOST_SHARE * (w.cluster.host_ram_gib or 0.0), w.cluster.nvme_gib), strict=True
    ):
        if needed:
            shares.append(needed / available if available else 2.0)
    return sum(share > 1 for share in shares), sorted(shares, reverse=True)


def shortfall(w: Workload) -> str:
    """Text for a layout that does not fit: GiB needed, GiB available, and the difference."""
    cluster, peak, usable = w.cluster, peak_gib(w), usable_gib(w.cluster.gpu)
    parts = [f"needs {peak:.1f} GiB a GPU, {usable:.1f} of {cluster.gpu.memory_gib:.1f} are usable"]
    if peak > usable:
        parts[0] += f": {peak - usable:.1f} GiB too many"
    host, disks = _node_gib(w)
    if host and cluster.host_ram_gib is None:
        parts.append(f"{host:.0f} GiB of host memory a node, which is not known")
    elif cluster.host_ram_gib is not None and host > (available := HOST_SHARE * cluster.host_ram_gib):
        text = f"{host:.0f} GiB of host memory a node, {available:.0f} of {cluster.host_ram_gib:.0f} are usable"
        parts.append(f"{text}: {host - available:.0f} GiB too many")
    if disks and cluster.nvme_gib is None:
        parts.append(f"{disks:.0f} GiB of NVMe a node, which is not known")
    elif cluster.nvme_gib is not None and disks > cluster.nvme_gib:
        over = disks - cluster.nvme_gib
        parts.append(f"{disks:.0f} GiB of NVMe a node, which has {cluster.nvme_gib:.0f}: {over:.0f} GiB too many")
    return "; ".join(parts)


def _node_gib(w: Workload) -> tuple[float, float]:
    """(host memory, disk) that a node needs, GiB."""
    return host_ram_gib_per_node(w), nvme_gib_per_node(w)
