"""Where half the GPUs take a shorter step than all of them, or can divide a batch that all of them cannot."""

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
"""Share of compute in a step above which fewer GPUs are not searched: a search takes as long as the plan did. Half the
GPUs compute twice as long, so they are slower where the share is over a half. The tenth above a half is for GEMMs that
grow more efficient."""


def faster_with_fewer(request: Request, best: Candidate) -> Iterator[Decision]:
    """One note where fewer GPUs would do a step faster than the plan's ``best``."""
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
    """For a batch that does not divide over the GPUs: the nearest batches that do, and the most GPUs, each with what
    its step takes."""
    gpus, batch = request.cluster.num_gpus, request.job.global_batch_size
    for nearest in filter(None, (batch // gpus * gpus, (batch // gpus + 1) * gpus)):
        found = search(replace(request, job=replace(request.job, global_batch_size=nearest))).best
        if found is not None:
            yield f"with job.global_batch_size={nearest} it takes {human_seconds(step_s(found))} a step"
    for fewer, found in _fewer(request):
        yield f"with {fewer.cluster.num_gpus} GPUs it takes {human_seconds(step_s(found))} a step"
        return


def _fewer(request: Request) -> Iterator[tuple[Request, Candidate]]:
    """Half the nodes, a quarter, …, then half the GPUs of one node, where something fits."""
    cluster = request.cluster
    while cluster.num_gpus > 1:
        if cluster.num_nodes > 1:
            cluster = changed(cluster, num_nodes=cluster.num_nodes // 2)
        else:
            cluster = changed(cluster, gpus_per_node=cluster.gpus_per_node // 2)
        fewer = replace(request, cluster=cluster)
        if (found := search(fewer).best) is not None:
            yield fewer, found
