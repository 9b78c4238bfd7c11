"""Notes when fewer GPUs would be faster, and when the batch divides over fewer GPUs but not over all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kit.cost.time.step import StepTimer
from kit.planner.plan import Decision
from kit.planner.request import Request
from kit.planner.search import Candidate, search, step_s
from kit.specs.base import changed
from kit.units import human_seconds

_SHARE_OF_COMPUTE = 0.6
"""If compute takes a larger share of the step, fewer GPUs are not searched, because a search takes as long as the plan.
Half the GPUs compute twice as long, so with a share above 0.5 they are slower; 0.1 more allows for GEMMs that become
more efficient."""


def faster_with_fewer(request: Request, best: Candidate) -> Iterator[Decision]:
    """One note if fewer GPUs have a shorter step than ``best``."""
    components = StepTimer().components_s(request.workload(best.layout))
    if components["compute"] > _SHARE_OF_COMPUTE * sum(components.values()):
        return
    quickest, gpus = best, request.cluster.num_gpus
    for fewer, found in _fewer(request):
        if step_s(found) >= step_s(quickest):
            break
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
            yield f"with job.global_batch_size={nearest} it takes {human_seconds(step_s(found))} a step"
    for fewer, found in _fewer(request):
        yield f"with {fewer.cluster.num_gpus} GPUs it takes {human_seconds(step_s(found))} a step"
        return


def _fewer(request: Request) -> Iterator[tuple[Request, Candidate]]:
    """(request, best candidate) for half the nodes, a quarter, …, then half the GPUs of one node, where a layout
    fits."""
    cluster = request.cluster
    while cluster.num_gpus > 1:
        if cluster.num_nodes > 1:
            cluster = changed(cluster, num_nodes=cluster.num_nodes // 2)
        else:
            cluster = changed(cluster, gpus_per_node=cluster.gpus_per_node // 2)
        fewer = replace(request, cluster=cluster)
        if (found := search(fewer).best) is not None:
            yield fewer, found
