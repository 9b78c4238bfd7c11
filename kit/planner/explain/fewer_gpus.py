"""Notes when fewer GPUs would be faster, and when the batch divides over fewer GPUs but not over all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kit.cost.time.step import StepTimer
from kit.errors import HINT
from kit.planner.plan import Decision
from kit.planner.request import Request
from kit.planner.search import Candidate, faster_than, search, step_s
from kit.specs.validation import changed
from kit.units import human_seconds

_MOST_COMPUTE = 1.2
"""Half the GPUs compute twice as long. If that is more than this share of the whole step, they are not searched: above
1 they are slower, and 0.2 allow for GEMMs that become more efficient."""


def faster_with_fewer(request: Request, best: Candidate) -> Iterator[Decision]:
    """One note if fewer GPUs have a shorter step than ``best``."""
    components = StepTimer().components_s(request.workload(best.layout))
    share = components["compute"] / sum(components.values())
    quickest, gpus = best, request.cluster.num_gpus
    for fewer in _halved(request):
        if share * request.cluster.num_gpus / fewer.cluster.num_gpus > _MOST_COMPUTE:
            break
        if (found := faster_than(fewer, step_s(quickest))) is not None:
            quickest, gpus = found, fewer.cluster.num_gpus
    if quickest is not best:
        yield Decision(
            rule="num_gpus",
            chosen=str(request.cluster.num_gpus),
            why=f"fewer GPUs do it faster: {gpus} take {human_seconds(step_s(quickest))} a step, "
            f"{request.cluster.num_gpus} take {human_seconds(step_s(best))}; with "
            f"global_batch_size={request.job.global_batch_size} each of them has too little work",
        )


def batch_divides(request: Request) -> Iterator[str]:
    """For a batch that does not divide over the GPUs: the nearest batches that divide, and the largest number of GPUs
    over which the batch divides, each with its step time."""
    gpus, batch = request.cluster.num_gpus, request.job.global_batch_size
    for nearest in filter(None, (batch // gpus * gpus, (batch // gpus + 1) * gpus)):
        found = search(replace(request, job=replace(request.job, global_batch_size=nearest))).best
        if found is not None:
            yield f"{HINT}with job.global_batch_size={nearest} it takes {human_seconds(step_s(found))} a step"
    for fewer in _halved(request):
        if (found := search(fewer).best) is not None:
            yield f"{HINT}with {fewer.cluster.num_gpus} GPUs it takes {human_seconds(step_s(found))} a step"
            return


def _halved(request: Request) -> Iterator[Request]:
    """The request with half the nodes, a quarter, …, then half the GPUs of one node."""
    cluster = request.cluster
    while cluster.num_gpus > 1:
        if cluster.num_nodes > 1:
            cluster = changed(cluster, num_nodes=cluster.num_nodes // 2)
        else:
            cluster = changed(cluster, gpus_per_node=cluster.gpus_per_node // 2)
        yield replace(request, cluster=cluster)
