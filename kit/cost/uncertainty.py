"""How far step-time predictions of a kind lie off, and whose measurements say so.

``bands.yaml`` and ``bands-elsewhere.yaml`` are generated, the latter from sources that no constant was estimated from.
"""

from __future__ import annotations

from typing import NamedTuple

from kit.cost.hardware import generation_of, gpu_rates, has_rates
from kit.cost.workload import Workload
from kit.specs.catalog.rows import rows
from kit.specs.layout import Layout


class Evidence(NamedTuple):
    """What is known of predictions like this one."""

    band: float | None
    """Relative error that 80 % of rows of the same code stay below, predicted without their own source; null without
    such rows."""
    words: str
    """The rows that the band is from, or the nearest that there are."""


def step_time_evidence(workload: Workload) -> Evidence:
    """Looks up the band by the code that computes a layer: one implementation's figures are never used for another."""
    model, cluster, layout = workload.model, workload.cluster, workload.layout
    generation = generation_of(cluster.gpu)
    if not gpu_rates(cluster.gpu.name).measured:
        assumed = "" if has_rates(cluster.gpu) else "; what its kernels reach is assumed (efficiency.yaml, default)"
        return Evidence(None, f"no published run on {cluster.gpu.name} to compare with{assumed}")
    what = "experts" if model.num_experts else "dense"
    if layout.implementation == "transformer_engine":
        return _own(_by_generation(f"transformer_engine, {what}", generation))
    if layout.offload_optimizer != "none" or layout.offload_param != "none":
        return _offloaded(layout)
    if layout.implementation == "local":
        like = rows("bands-elsewhere").get(f"torch's kernels with megatron, {what}")
        if like and layout.engine == "megatron" and generation == "ampere":  # where others measured it
            return Evidence(float(like["width"]), f"holds for 80 % of {like['rows']} published runs of similar code")
        regime = _by_generation(f"transformer_engine, {what}", generation)
        return _borrowed("Megatron's local layers", regime, "with Transformer Engine")
    if layout.engine == "deepspeed" and what == "dense":
        return _own("huggingface with deepspeed, dense")
    return _borrowed(
        f"Hugging Face layers with engine={layout.engine}",
        f"other programs with fsdp, {what}",
        "of other FSDP programs",
    )


OFFLOADED_RUNS, OFFLOADED_TIMES = 6, (1.9, 2.2)
"""Published runs with the optimizer on the host (one source, rows ``ds-dcomp-70b-off-…-zero3-…`` of the accuracy page),
and how many times as long as predicted the best and the worst of them took: too few for a band."""


def _offloaded(layout: Layout) -> Evidence:
    least, most = OFFLOADED_TIMES
    runs = f"{OFFLOADED_RUNS} published runs with the optimizer on the host"
    host = f"{runs} took {least} to {most} times as long as predicted"
    if "nvme" in (layout.offload_optimizer, layout.offload_param):
        return Evidence(None, f"no published run offloads to disks; {host}")
    return Evidence(None, host)


def _by_generation(regime: str, generation: str) -> str:
    """The band of the GPU's generation where there are rows enough for one, else of all."""
    own = f"{regime}, {'Blackwell' if generation == 'blackwell' else 'up to Hopper'}"
    return own if own in rows("bands") else regime


def _own(regime: str) -> Evidence:
    row = rows("bands").get(regime)
    if row is None:
        return Evidence(None, "no published run of this kind to compare with")
    return Evidence(float(row["width"]), f"holds for 80 % of {row['rows']} published runs of the same code")


def _borrowed(own: str, regime: str, whose: str) -> Evidence:
    row = rows("bands").get(regime)
    if row is None:
        return Evidence(None, f"no published run of {own}")
    return Evidence(None, f"no published run of {own}; ± {row['width']:.0%} for 80 % of {row['rows']} runs {whose}")
