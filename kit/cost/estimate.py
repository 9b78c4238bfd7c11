"""All predictions of the cost model for one layout; the error band of its step time, and the published runs from which
each band was computed.

``bands.yaml`` and ``bands-elsewhere.yaml`` are generated. No constant was fitted to the runs of the latter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from kit.cost.hardware import generation_of, gpu_rates, has_rates, peak_flops_per_s
from kit.cost.memory.offload import host_ram_gib_per_node, nvme_gib_per_node
from kit.cost.memory.peak import StageMemory, peak_memory
from kit.cost.model.flops import model_flops_per_token
from kit.cost.reliability import Operation, operation
from kit.cost.time.step import StepTimer, bubble_fraction
from kit.cost.workload import Workload
from kit.specs.catalog.rows import rows
from kit.specs.cluster import ClusterSpec
from kit.specs.text import first
from kit.specs.validation import Text, stored
from kit.units import SECONDS_PER_DAY


@stored
class Prediction:
    """What the cost model says of a layout."""

    memory: tuple[StageMemory, ...]
    """One entry a pipeline stage."""
    host_ram_gib_per_node: float
    """Host memory that offload takes on each node."""
    nvme_gib_per_node: float = 0.0
    """Disk that offload takes on each node."""
    step_time_s: float
    """One optimizer step."""
    step_time_components_s: dict[Text, float]
    """By the names of ``kit.cost.time.step.StepTimeModel.components_s``; they add up to the step."""
    tokens_per_s: float
    """Tokens per second over all GPUs."""
    mfu: float
    """Causal model FLOPs over the dense peak of the precision."""
    bubble_fraction: float
    """(p−1)/(v·m+p−1): share of a step that a pipeline stage idles."""
    days: float | None
    """For the job's length, without checkpoints and failures; null where only the data can say how long it is."""
    cost_usd: float | None
    """For the same days; null without a price or days."""
    memory_band: float | None = None
    """Relative error of memory predictions of this kind against measurements; null = not yet measured."""
    step_time_band: float | None = None
    """Relative error of step-time predictions for this implementation; null = not yet measured."""
    step_time_evidence: Text = ""
    """The runs that the band was measured on, or the nearest ones that were measured."""
    operation: Operation
    """Checkpoints and failures."""

    @property
    def peak_gib(self) -> float:
        """Peak of the fullest stage."""
        return max(stage.peak_gib for stage in self.memory)

    @property
    def num_steps(self) -> float | None:
        """Optimizer steps in ``days``."""
        return None if self.days is None else self.days * SECONDS_PER_DAY / self.step_time_s

    @property
    def total_days(self) -> float | None:
        """``days`` including checkpoints and failures: infinite where these leave no time for training."""
        return None if self.days is None else self._including_stops(self.days)

    @property
    def total_cost_usd(self) -> float | None:
        """``cost_usd`` including checkpoints and failures; None without a price."""
        return None if self.cost_usd is None else self._including_stops(self.cost_usd)

    def for_steps(self, steps: float | None, cluster: ClusterSpec) -> Prediction:
        """With days and money of so many steps; None: as it is."""
        if steps is None:
            return self
        days = steps * self.step_time_s / SECONDS_PER_DAY
        return replace(self, days=days, cost_usd=cost_usd(cluster, days))

    def _including_stops(self, quantity: float) -> float:
        return quantity / self.operation.goodput if self.operation.goodput else math.inf


def predict(workload: Workload) -> Prediction:
    """Predicts memory, time and cost of a layout that the planner's rules accept."""
    model, cluster, job, layout = workload.model, workload.cluster, workload.job, workload.layout
    components = StepTimer().components_s(workload)
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


class Evidence(NamedTuple):
    """The error band of a prediction, and the runs behind the band."""

    band: float | None
    """Relative error that 80 % of published runs of the same code stay below. Each run is predicted with constants
    fitted without its source. None if there are no such runs."""
    words: str
    """The published runs behind the band, or the most similar runs."""


def step_time_evidence(workload: Workload) -> Evidence:
    """Looks up the band by the code that computes a layer: one implementation's figures are never used for another."""
    model, cluster, layout = workload.model, workload.cluster, workload.layout
    generation, what = generation_of(cluster.gpu), "experts" if model.num_experts else "dense"
    assumed = "" if has_rates(cluster.gpu) else "; what its kernels reach is assumed (efficiency.yaml, default)"
    lacking = {
        f"no published run on {cluster.gpu.name} to compare with{assumed}": not gpu_rates(cluster.gpu.name).measured,
        f"no published run of TRL's {workload.trl and workload.trl.trainer} to compare with": workload.trl,
        "no published run offloads to disks": layout.uses_nvme,
    }
    if (none := first(lacking)) is not None:
        return Evidence(None, none)
    special, huggingface = _special(workload), layout.implementation == "huggingface"
    if special and (huggingface or special == ", LoRA"):
        others = f"other programs with fsdp, {what}{special}"
        if huggingface and layout.engine == "torch":
            return _borrowed(f"Hugging Face layers with engine=torch{special}", others, "of other FSDP programs")
        code = "huggingface with deepspeed" if huggingface else layout.implementation
        return _own(f"{code}, {what}{special}")
    if layout.implementation == "transformer_engine":
        return _own(_by_generation(f"transformer_engine, {what}", generation))
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


def _special(workload: Workload) -> str:
    """Suffix of the band's name for plans with offload, LoRA or fp8."""
    layout = workload.layout
    if layout.offload_optimizer != "none" or layout.offload_param != "none":
        return ", offload"
    return ", LoRA" if workload.job.lora is not None else ", fp8" if workload.job.precision == "fp8" else ""


def _by_generation(regime: str, generation: str) -> str:
    """Name of the band for the GPU's generation, or for all generations if that has too few rows."""
    own = f"{regime}, {'Blackwell' if generation == 'blackwell' else 'up to Hopper'}"
    found = rows("bands").get(own)
    return own if found and not found.get("few") else regime


def _own(regime: str) -> Evidence:
    row = rows("bands").get(regime)
    if row is None:
        return Evidence(None, "no published run of this kind to compare with")
    if row.get("few"):
        return Evidence(None, f"too few published runs for a band: {row['rows']}, all within ± {row['width']:.0%}")
    return Evidence(float(row["width"]), f"holds for 80 % of {row['rows']} published runs of the same code")


def _borrowed(own: str, regime: str, whose: str) -> Evidence:
    row = rows("bands").get(regime)
    if row is None:
        return Evidence(None, f"no published run of {own}")
    share = "all" if row.get("few") else "80 %"
    return Evidence(None, f"no published run of {own}; ± {row['width']:.0%} for {share} of {row['rows']} runs {whose}")
