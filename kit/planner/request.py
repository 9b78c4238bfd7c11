"""The input of a search: model, cluster, job, pins, and the calibration from earlier runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kit.cost.workload import Workload
from kit.planner.calibration import NONE, Calibration
from kit.specs.cluster import ClusterSpec
from kit.specs.job import BalancingSpec, JobSpec
from kit.specs.layout import Layout, Pins
from kit.specs.model import ModelSpec
from kit.specs.validation import cached, changed, trusted


@dataclass(frozen=True, kw_only=True)
class Request:
    """The input of a search. Pretraining without ``job.balancing`` balances experts as the model's family was
    published."""

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    pins: Pins = field(default_factory=Pins)
    calibration: Calibration = NONE
    tight: bool = False
    """Whether a layout may fill the GPU up to what the prediction says, without room for its error."""

    def __post_init__(self) -> None:
        published, job = self.model.traits.balancing, self.job
        if published and job.balancing is None and job.objective == "pretrain" and job.lora is None:
            object.__setattr__(self, "job", changed(job, balancing=trusted(BalancingSpec, published)))
        if self.model.mtp_num_layers != self.job.mtp_num_layers:
            object.__setattr__(self, "model", replace(self.model, mtp_num_layers=self.job.mtp_num_layers))

    def workload(self, layout: Layout) -> Workload:
        """The candidate plan with ``layout``."""
        return self._work.with_layout(layout)

    def halved(self) -> Iterator[Request]:
        """The request on half its GPUs, on a quarter, and so on: first fewer nodes, then fewer GPUs of one."""
        cluster = self.cluster
        while cluster.num_gpus > 1:
            if cluster.num_nodes > 1:
                cluster = changed(cluster, num_nodes=cluster.num_nodes // 2)
            else:
                cluster = changed(cluster, gpus_per_node=cluster.gpus_per_node // 2)
            yield replace(self, cluster=cluster)

    @cached
    def _work(self) -> Workload:
        """Model, cluster and job; nobody reads its layout."""
        return Workload(self.model, self.cluster, self.job, Layout(engine="torch", implementation="huggingface"))
