"""Everything the cost model says of one layout."""

from __future__ import annotations

from kit.cost.bands import step_time_evidence
from kit.cost.efficiency import peak_flops_per_s
from kit.cost.flops import model_flops_per_token
from kit.cost.memory import peak_memory
from kit.cost.offload import host_ram_gib_per_node, nvme_gib_per_node
from kit.cost.operation import operation
from kit.cost.prediction import Prediction
from kit.cost.step_time import bubble_fraction, step_time_components_s
from kit.cost.workload import Workload
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from kit.units import SECONDS_PER_DAY, SECONDS_PER_HOUR


def predict(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> Prediction:
    """Memory, time and money of a legal layout (the planner's rules say which are)."""
    components = step_time_components_s(model, cluster, job, layout)
    step_time_s = sum(components.values())
    tokens_per_s = layout.global_batch_size * job.seq_length / step_time_s
    seconds = job.total_tokens / tokens_per_s
    peak = layout.world_size * peak_flops_per_s(cluster.gpu, job.precision)
    evidence = step_time_evidence(model, cluster, layout)
    price = cluster.price_per_node_hour_usd
    return Prediction(
        memory=peak_memory(model, cluster, job, layout),
        host_ram_gib_per_node=host_ram_gib_per_node(model, cluster, layout, job.precision),
        nvme_gib_per_node=nvme_gib_per_node(model, cluster, layout, job.precision),
        step_time_s=step_time_s,
        step_time_components_s=components,
        tokens_per_s=tokens_per_s,
        mfu=tokens_per_s * model_flops_per_token(model, job.seq_length) / peak,
        bubble_fraction=bubble_fraction(layout),
        days=seconds / SECONDS_PER_DAY,
        cost_usd=None if price is None else price * cluster.num_nodes * seconds / SECONDS_PER_HOUR,
        step_time_band=evidence.band,
        step_time_evidence=evidence.words,
        operation=operation(Workload(model=model, cluster=cluster, job=job, layout=layout), step_time_s),
    )
