"""How far step-time predictions of a kind lie off, and whose measurements say so.

``bands.yaml`` and ``bands-elsewhere.yaml`` are generated, the latter from sources that no constant was estimated from.
"""

from __future__ import annotations

from dataclasses import dataclass

from kit.cost.hardware import GpuRates, gpu_rates
from kit.cost.workload import Workload
from kit.specs.catalog.rows import rows
from kit.specs.layout import Layout


@dataclass(frozen=True)
class Evidence:
    """What is known of predictions like this one."""

    band: float | None
    """Relative error that 80 % of rows of the same code stay below, predicted without their own source; null without
    such rows."""
    words: str
    """The rows that the band is from, or the nearest that there are."""


def step_time_evidence(workload: Workload) -> Evidence:
    """Looks up the band by the code that computes a layer: one implementation's figures are never used for another."""
    model, cluster, layout = workload.model, workload.cluster, workload.layout
    gpu = gpu_rates(cluster.gpu.name)
    if not gpu.measured:
        return Evidence(None, f"no measurements on {cluster.gpu.name}")
    what = "experts" if model.num_experts else "dense"
    if layout.implementation == "transformer_engine":
        return _own(_by_generation(f"transformer_engine, {what}", gpu))
    if layout.offload_optimizer != "none" or layout.offload_param != "none":
        return _offloaded(layout)
    if layout.implementation == "local":
        like = rows("bands-elsewhere").get(f"torch's kernels with megatron, {what}")
        if like and layout.engine == "megatron" and gpu.generation == "ampere":  # where others measured it
            return Evidence(float(like["width"]), f"80 % of {like['rows']} published runs of code like it lie within")
        regime = _by_generation(f"transformer_engine, {what}", gpu)
        return _borrowed("local", regime, "Transformer Engine's kernels")
    if layout.engine == "deepspeed" and what == "dense":
        return _own("huggingface with deepspeed, dense")
    return _borrowed(f"huggingface with {layout.engine}", f"other programs with fsdp, {what}", "other FSDP programs")


OFFLOADED_RUNS, OFFLOADED_TIMES = 6, (1.9, 2.2)
"""Published runs with the optimizer on the host (one source, rows ``ds-dcomp-70b-off-…-zero3-…`` of the accuracy page),
and how many times as long as predicted the best and the worst of them took: too few for a band."""


def _offloaded(layout: Layout) -> Evidence:
    least, most = OFFLOADED_TIMES
    took = f"took {least} to {most} times as long as predicted"
    host = f"{OFFLOADED_RUNS} published runs with the optimizer on the host {took}"
    if "nvme" in (layout.offload_optimizer, layout.offload_param):
        return Evidence(None, f"no measurements of offload to disks; {host}")
    return Evidence(None, f"no band: {host}")


def _by_generation(regime: str, gpu: GpuRates) -> str:
    """The band of the GPU's generation where there are rows enough for one, else of all."""
    own = f"{regime}, {'Blackwell' if gpu.generation == 'blackwell' else 'up to Hopper'}"
    return own if own in rows("bands") else regime


def _own(regime: str) -> Evidence:
    row = rows("bands").get(regime)
    if row is None:
        return Evidence(None, "no measurements of this kind")
    return Evidence(float(row["width"]), f"80 % of {row['rows']} published runs of the same code lie within")


def _borrowed(own: str, regime: str, whose: str) -> Evidence:
    row = rows("bands").get(regime)
    if row is None:
        return Evidence(None, f"no measurements of {own}")
    return Evidence(None, f"no measurements of {own}; ± {row['width']:.0%} on {row['rows']} runs of {whose}")
