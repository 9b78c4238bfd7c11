"""What there is to say of a plan: a frozen value, made once, of which every renderer draws its part."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from kit.cost.estimate import Prediction
from kit.cost.hardware import usable_gib
from kit.cost.memory.peak import COMPONENTS, StageMemory
from kit.cost.model.params import count
from kit.planner.plan import Alternative, Decision, Plan
from kit.report.pipeline_schedule import Drawn, drawn
from kit.specs.catalog import cheapest_node_with, node_names, parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import describe
from kit.specs.validation import changed
from kit.units import human_count

WIDTH = 110
"""Columns of a text."""
BILLION = 10**9
"""Tokens of which time and money are printed where a run's length is not known."""
SHOWN_GIB = 0.05
"""Components below this in every stage are not in a table or a picture, but they count in the peak."""
SHOWN_SHARE = 0.001
"""Share of a step below which a component is not in its text."""
ENGINE_NAMES = {
    "torch": "PyTorch",
    "deepspeed": "DeepSpeed",
    "deepspeed over megatron": "DeepSpeed over Megatron-core",
    "megatron": "Megatron-core",
}
ENGINE_COLORS = {"torch": "#e07b39", "deepspeed": "#2f7ed8", "megatron": "#3c9a5f"}
PART_COLORS = (
    "#4e79a7", "#f28e2b", "#e15759", "#59a14f", "#b07aa1", "#edc948", "#9c9c9c", "#76b7b2", "#ff9da7", "#9c755f",
)  # fmt: skip
"""Colours of the parts of a bar, in their order."""
_NOTES = (
    "last_resort",
    "memory_margin",
    "model",
    "num_gpus",
    "seq_length",
    "precision",
    "optimizer",
    "tp_across_nodes",
    "implementation",
    "pin",
    "extra",
)
"""Rules of decisions that a user must not miss."""


@dataclass(frozen=True, kw_only=True)
class PlanView:
    """A plan with what its figures and decisions come to in words."""

    plan: Plan
    """With a length: of a billion tokens, where nobody says how long the run is."""
    method: str
    """What is trained how: ``pretraining``, ``SFT``, ``SFT, QLoRA nf4 r16`` …"""
    parameters: str
    """Number of the model's parameters, such as ``8.03B``."""
    nodes: str
    """``2 × p5.48xlarge``; without a number where there is one."""
    layout: str
    """``describe``'s line."""
    words: str
    """``layout`` in the field's words."""
    memory_gib: dict[str, list[float]]
    """Component → GiB of each stage (``by_component``)."""
    usable_gib: float
    """Memory of a GPU without the margin for CUDA and the allocator."""
    limits: str
    """``usable_gib`` and the whole of a GPU in words: ``74.2 usable (79.6 total)``."""
    step_s: dict[str, float]
    """Words for a component → its seconds of a step, without those that take none."""
    step_band: str
    """How far measured steps are from predicted ones."""
    alternatives: tuple[str, ...]
    """The best layout of each other engine, and by how much its step is longer."""
    notes: tuple[Decision, ...]
    """What a user must not miss."""
    drawn: Drawn | None
    """Sizes of the pipeline's picture; None without a pipeline."""

    @property
    def shown_s(self) -> dict[str, float]:
        """The components that take more than ``SHOWN_SHARE`` of the step."""
        least = SHOWN_SHARE * self.plan.predicted.step_time_s
        return {name: seconds for name, seconds in self.step_s.items() if seconds >= least}


def view_of(plan: Plan) -> PlanView:
    """All that the renderers print of a plan."""
    cluster, parts, layout = plan.cluster, plan.predicted.step_time_components_s, describe(plan.layout)
    return PlanView(
        plan=with_length(plan),
        method=method(plan.job),
        parameters=human_count(count(plan.model).total),
        nodes=f"{cluster.num_nodes} × {cluster.name}" if cluster.num_nodes > 1 else cluster.name,
        layout=layout,
        words=spoken(layout),
        memory_gib=by_component(plan.predicted.memory),
        usable_gib=usable_gib(cluster.gpu),
        limits=f"{usable_gib(cluster.gpu):.1f} usable ({cluster.gpu.memory_gib:.1f} total)",
        step_s={name.replace("_", " "): seconds for name, seconds in parts.items() if seconds > 0},
        step_band=_step_band(plan.predicted),
        alternatives=tuple(_beside(each, plan) for each in plan.alternatives),
        notes=tuple(decision for decision in plan.decisions if decision.rule in _NOTES),
        drawn=drawn(plan.layout) if plan.layout.pp > 1 else None,
    )


_ADAPTERS = {"four_bit": "QLoRA nf4", "eight_bit": "LoRA int8", "": "LoRA"}


def method(job: JobSpec) -> str:
    """Objective and adapters of a job in the field's words."""
    words = {"pretrain": "pretraining", "seq2seq": "sequence to sequence", "reward": "reward model"}
    objective = words.get(job.objective, job.objective.upper())
    if job.lora is None:
        return objective
    return f"{objective}, {_ADAPTERS[job.lora.quantised]} r{job.lora.rank}"


def by_component(stages: Iterable[StageMemory]) -> dict[str, list[float]]:
    """Component → GiB of each stage, for those that take ``SHOWN_GIB`` in one."""
    found = {name: [stage.components_gib[name] for stage in stages] for name in COMPONENTS}
    return {name: sizes for name, sizes in found.items() if max(sizes) >= SHOWN_GIB}


def cells(stage: StageMemory, components: Iterable[str]) -> str:
    """A row of a table: GiB of the components, then the peak."""
    sizes = [*(stage.components_gib[name] for name in components), stage.peak_gib]
    return "".join(f"{size:>12.1f}" for size in sizes)


@lru_cache(maxsize=8192)  # the page of kit ui asks it of every layout, and again after each change
def spoken(description: str) -> str:
    """``describe``'s line in the field's words: ``megatron, tp=2, sp`` → ``Megatron-core TP 2 + sequence parallel``."""
    engine, *parts = [part for part in description.split(", ") if part != "dp=1"]
    if "sp" in parts:
        parts.remove("sp")
        parts[0] += " + sequence parallel"
    text = re.sub(r"\b([a-z]{2,3})=(\d+)", lambda m: f"{m[1].upper()} {m[2]}", " · ".join(parts))
    text = re.sub(r"(DP \d+) · (?=ZeRO|FSDP2|DDP|distributed)", r"\1, ", text)
    text = text.replace("FSDP2 (zero_stage=2)", "FSDP2 (ZeRO-2)").replace("micro batch", "micro-batch")
    return f"{ENGINE_NAMES[engine]} " + re.sub(r"(?<=\d) x (?=\d)", "\u00a0×\u00a0", text)


def _step_band(predicted: Prediction) -> str:
    if predicted.step_time_band is not None:
        return f"± {predicted.step_time_band:.0%}"
    similar = re.search(r"± \d+%", predicted.step_time_evidence)
    return f"{similar[0]} for similar code" if similar else "no published run to compare with"


def _beside(other: Alternative, plan: Plan) -> str:
    """The layout of another engine, and by how much its step is longer."""
    parts = [part for part in other.layout.split(", ") if not part.startswith(("dp=", "micro batch", "vp="))]
    behind = other.step_time_s / plan.predicted.step_time_s - 1
    return f"{spoken(', '.join(parts)).replace(' ·', '')} {behind:+.1%}"


# ---------------------------------------------------------------- length and money of a whole run


def run_length(plan: Plan) -> str:
    """The length of the run in words: tokens, or epochs and the steps that are known."""
    job, steps = plan.job, plan.predicted.num_steps
    if (tokens := tokens_of(plan)) is not None:
        return f"{human_count(tokens)} tokens" + ("" if job.objective == "pretrain" else " in full sequences")
    known = "" if steps is None else f"{round(steps):,} steps"
    return known if job.epochs is None else f"{job.epochs:g} epochs, {known}"


def tokens_of(plan: Plan) -> int | None:
    """Tokens for which days are predicted; None if days are of a number of steps, or not known."""
    tokens, steps = plan.job.total_tokens, plan.predicted.num_steps
    same = tokens and steps and math.isclose(steps * plan.job.tokens_per_step, tokens, rel_tol=1e-6)
    return tokens if same else None


def at_most(plan: Plan) -> str:
    """A word before days of steps of rows, which are predicted for rows of seq_length."""
    return "" if plan.job.objective == "pretrain" or tokens_of(plan) else "at most "


def with_length(plan: Plan) -> Plan:
    """The plan; where its length is not known, that of a billion tokens."""
    if plan.predicted.days is not None:
        return plan
    job = of_a_billion(changed(plan.job, epochs=None))
    return replace(plan, job=job, predicted=plan.predicted.for_steps(BILLION / job.tokens_per_step, plan.cluster))


def of_a_billion(job: JobSpec) -> JobSpec:
    """The job; where nobody says how many tokens it has, with a billion."""
    return job if job.total_tokens is not None or job.epochs is not None else changed(job, total_tokens=BILLION)


def usd_per_hour(cluster: ClusterSpec) -> float | None:
    """The price of a cluster for an hour. One without a price, such as a DGX or a part of a catalog node, is priced per
    GPU as the cheapest catalog node with the same GPU; None where that has none."""
    if cluster.price_per_node_hour_usd is not None:
        return cluster.price_per_node_hour_usd * cluster.num_nodes
    cheapest = cheapest_node_with(cluster.gpu)
    return None if cheapest is None else cheapest[1] * cluster.num_gpus


def money(cluster: ClusterSpec, days: float) -> str:
    """The cost of a cluster for so many days, and its price (``usd_per_hour``)."""
    hourly, cheapest = usd_per_hour(cluster), cheapest_node_with(cluster.gpu)
    if hourly is None:
        return _no_price(cluster)
    if cluster.price_per_node_hour_usd is not None or cheapest is None:
        node, own, at = cluster, "", f"${cluster.price_per_node_hour_usd:,.2f} a node and hour"
    else:
        node, own = cheapest[0], f" ({_no_price(cluster)})"
        at = f"{node.name}'s ${cheapest[1]:,.2f} a GPU and hour"
    when = f", {node.price_date}" if node.price_date else ""
    return f"${hourly * 24 * days:,.0f} at {at}{when}{own}"


def _no_price(cluster: ClusterSpec) -> str:
    whole = parse_cluster(f"{cluster.name}:1") if cluster.name in node_names() else cluster
    if cluster.gpus_per_node < whole.gpus_per_node:
        return f"no price for {cluster.gpus_per_node} of the {whole.gpus_per_node} GPUs of a {cluster.name}"
    return f"no price is known for {cluster.name}"
