"""How long an optimizer step of a plan takes, by component."""

from __future__ import annotations

from kit.cost.hardware import cpu_adam_s, pcie_bytes_per_s, shared
from kit.cost.model.params import count
from kit.cost.setup import Program
from kit.cost.time.collectives import fills_the_link, group
from kit.cost.time.data_parallel import exposed
from kit.cost.time.gpu import machine_of
from kit.cost.time.pipeline_time import TIME_COMPONENTS, StepTimeModel
from kit.cost.workload import Workload
from kit.specs.layout import Layout

__all__ = ["TIME_COMPONENTS", "StepTimer", "bubble_fraction", "step_time_components_s"]


def bubble_fraction(layout: Layout) -> float:
    """(p−1)/(v·m+p−1): share of a step in which a stage idles (Narayanan et al. 2021, arXiv 2104.04473, 2.2)."""
    p, v, m = layout.pp, layout.vp, layout.gradient_accumulation_steps
    return (p - 1) / (v * m + p - 1)


class StepTimer:
    """Times layouts of one model, cluster and job; what layouts share is computed once."""

    def __init__(self) -> None:
        self._clocks: dict[Program, StepTimeModel] = {}

    def components_s(self, workload: Workload) -> dict[str, float]:
        """Seconds by component, which add up to the step."""
        setup, layout = workload.setup, workload.layout
        program = setup.program
        clock = self._clocks.get(program)
        if clock is None:
            clock = self._clocks[program] = StepTimeModel(
                machine_of(workload.cluster, program.precision, program.attention, program.linear_layers_only)
            )
        components = clock.components_s(setup)
        if layout.reduce_bucket_size is not None:
            components["data_parallel"] += _small_buckets(workload, layout.reduce_bucket_size)
        if layout.offload_optimizer != "none" or layout.offload_param != "none":
            components["optimizer"] = 0.0 if layout.offload_optimizer != "none" else components["optimizer"]
            components["offload"] = _offload(workload, components)
        return components


def step_time_components_s(workload: Workload) -> dict[str, float]:
    """Seconds by component, which add up to the step. Pipeline stages wait for the slowest one."""
    return StepTimer().components_s(workload)


def _small_buckets(workload: Workload, size: int) -> float:
    """Latency of the reductions that a small bucket adds; a bucket that fills the link is in the measured shares. A
    gradient that is larger than the bucket is reduced alone: at most nine matrices and norms of each layer."""
    model, cluster, layout = workload.model, workload.cluster, workload.layout
    parameters, most = count(model).total / layout.tp, 9 * (model.num_layers + model.encoder_layers)
    few, many = (min(most, parameters / max(1, each)) for each in (fills_the_link(cluster, layout), size))
    passes = layout.gradient_accumulation_steps if layout.zero_stage >= 2 else 1
    return passes * max(0.0, many - few) * group(cluster, layout.dp * layout.cp, layout.tp).latency_s


def _offload(workload: Workload, components: dict[str, float]) -> float:
    """Gradients to the host, Adam on its processors, weights back (ZeRO-Offload, arXiv 2101.06840).

    Offloaded weights come over PCIe
    for forward and for backward of each micro batch, each rank its part. From NVMe (ZeRO-Infinity, arXiv 2104.07857)
    come the same weights, and once a step master weights and moments, read and written, and gradients, written and
    read.
    """
    cluster, layout = workload.cluster, workload.layout
    total = count(workload.model).total
    share = total / layout.dp
    element = 2.0 if workload.job.precision != "fp32" else 4.0
    pcie = pcie_bytes_per_s(cluster.gpu)
    disk = (cluster.nvme_gbytes_per_s or shared().nvme_gbytes_per_s) * 1e9 * cluster.num_nodes
    m, seconds = layout.gradient_accumulation_steps, 0.0
    compute = (components["compute"] + components["recompute"]) / m
    if layout.offload_optimizer != "none":
        seconds += cpu_adam_s(total / cluster.num_nodes)
        seconds += m * exposed(element * share / pcie, 2 / 3 * compute)
        seconds += element * share / pcie if layout.offload_param == "none" else 0.0
    if layout.offload_optimizer == "nvme":
        # One sub group after the other, without pipelining: nothing overlaps.
        seconds += (2 * 12.0 + 2 * 4.0) * total / disk
    if layout.offload_param != "none":
        link = 2 * element * share / pcie
        if layout.offload_param == "nvme":
            link = max(link, 2 * element * total / disk)
            seconds += element * total / disk
        seconds += m * exposed(link, compute)
    return seconds
