"""All predictions of the cost model for one layout."""

from __future__ import annotations

from kit.cost.hardware import peak_flops_per_s
from kit.cost.memory.offload import host_ram_gib_per_node, nvme_gib_per_node
from kit.cost.memory.peak import peak_memory
from kit.cost.model.flops import model_flops_per_token
from kit.cost.prediction import Prediction
from kit.cost.reliability import operation
from kit.cost.time.step import bubble_fraction, step_time_components_s
from kit.cost.uncertainty import step_time_evidence
from kit.cost.workload import Workload
from kit.specs.cluster import ClusterSpec
from kit.units import SECONDS_PER_DAY


def predict(workload: Workload) -> Prediction:
    """Predicts memory, time and cost of a layout that the planner's rules accept."""
    model, cluster, job, layout = workload.model, workload.cluster, workload.job, workload.layout
    components = step_time_components_s(workload)
    step_time_s = sum(components.values())
    tokens_per_s = job.tokens_per_step / step_time_s
    tokens = job.total_tokens
    days = None if tokens is None else tokens / tokens_per_s / SECONDS_PER_DAY
    peak = layout.world_size * peak_flops_per_s(cluster.gpu, job.precision)
    evidence = step_time_evidence(workload)
    return Prediction(
        memory=peak_memory(workload),
        host_ram_gib_per_node=host_ram_gib_per_node(workload),
        nvme_gib_per_node=nvme_gib_per_node(workload),
        step_time_s=step_time_s,
        step_time_components_s=components,
        tokens_per_s=tokens_per_s,
        mfu=tokens_per_s * model_flops_per_token(model, job.seq_length, frozen=job.lora is not None) / peak,
        bubble_fraction=bubble_fraction(layout),
        days=days,
        cost_usd=cost_usd(cluster, days),
        step_time_band=evidence.band,
        step_time_evidence=evidence.words,
        operation=operation(workload, step_time_s),
    )


def cost_usd(cluster: ClusterSpec, days: float | None) -> float | None:
    """Cost of a cluster for so many days; None without a price or days."""
    price = cluster.price_per_node_hour_usd
    return None if price is None or days is None else price * cluster.num_nodes * days * 24
