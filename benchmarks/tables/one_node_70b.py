"""The tables of docs/one-node-70b.md: ways to hold 70B's states on one node, by the planner."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import kit
from kit.cost.memory.peak import COMPONENTS
from kit.cost.time.step import step_time_components_s
from kit.cost.workload import Workload
from kit.errors import PlanError
from kit.planner.describe import describe
from kit.planner.request import Request
from kit.report.memory_report import FitReport, memory_report
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.layout import Offload
from kit.units import GIB, human_seconds
from tests.support.page import table, whole

MODEL = load_model("llama-3-70b")
DRIVES, DRIVE_GBYTES_PER_S = 8, 4.0
NODE = dataclasses.replace(
    parse_cluster("8xH100"),
    name="one-node",
    host_ram_gib=2e12 / GIB,
    nvme_gib=DRIVES * 3.5e12 / GIB,
    nvme_gbytes_per_s=DRIVES * DRIVE_GBYTES_PER_S,
    source="the question: 8 H100, 2 TB of memory, 8 drives of 3.5 TB, striped",
)
TOKENS = 500_000_000
JOB = kit.JobSpec(seq_length=4096, global_batch_size=64, total_tokens=TOKENS, learning_rate=1e-5)


def _deepspeed(stage: int, optimizer: Offload = "none", param: Offload = "none", tp: int | None = None) -> kit.Pins:
    """``tp``: ZeRO over this much tensor parallelism of Megatron's layers."""
    return kit.Pins(
        engine="deepspeed",
        implementation="local" if tp else "huggingface",
        tp=tp,
        zero_stage=stage,
        offload_optimizer=optimizer,
        offload_param=param,
        optimizer_state_dtype="fp32",
    )


CHOICES = {
    "DeepSpeed without ZeRO": _deepspeed(0),
    "ZeRO-1": _deepspeed(1),
    "ZeRO-2": _deepspeed(2),
    "ZeRO-3": _deepspeed(3),
    "FSDP2": kit.Pins(engine="torch", tp=1, zero_stage=3, offload_optimizer="none", offload_param="none"),
    "Megatron: tensor and pipeline parallelism": kit.Pins(
        engine="megatron", zero_stage=1, offload_optimizer="none", offload_param="none", optimizer_state_dtype="fp32"
    ),
    "ZeRO-1, optimizer in host memory": _deepspeed(1, "cpu"),
    "ZeRO-2, optimizer in host memory": _deepspeed(2, "cpu"),
    "ZeRO-2 over tensor parallelism of 4, optimizer in host memory": _deepspeed(2, "cpu", tp=4),
    "ZeRO-3, optimizer in host memory": _deepspeed(3, "cpu"),
    "ZeRO-3, optimizer and weights in host memory": _deepspeed(3, "cpu", "cpu"),
    "ZeRO-3, optimizer on NVMe": _deepspeed(3, "nvme"),
    "ZeRO-3, optimizer on NVMe, weights in host memory": _deepspeed(3, "nvme", "cpu"),
    "ZeRO-3, optimizer and weights on NVMe": _deepspeed(3, "nvme", "nvme"),
}
"""Name of a way → its pins, without a last resort. The planner decides the rest."""


@dataclass(frozen=True)
class Outcome:
    """A memory report of one way, or the reason for which the planner refuses it."""

    report: FitReport | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether the GPUs, host memory and drives have room."""
        return self.report is not None and self.report.verdict != "does not fit"

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step; infinite where it does not run."""
        if self.report is None or not self.fits:
            return float("inf")
        return sum(step_time_components_s(Workload(MODEL, NODE, JOB, self.report.layout)).values())

    @property
    def days(self) -> float:
        """For all tokens."""
        return TOKENS / (JOB.seq_length * JOB.global_batch_size) * self.step_s / 86400


def outcomes() -> dict[str, Outcome]:
    """One outcome for every choice."""
    found = {}
    for name, pins in CHOICES.items():
        try:
            found[name] = Outcome(memory_report(Request(model=MODEL, cluster=NODE, job=JOB, pins=pins)))
        except PlanError as error:
            found[name] = Outcome(None, str(error).splitlines()[0])
    return found


def text() -> str:
    """Markdown: the answer, a table of choices, and one of what is on a GPU."""
    found = outcomes()
    heads = ("way", "verdict", "GiB a GPU", "host GiB", "NVMe GiB", "layout", "a step", "days")
    choices = table(heads, [(name, *_cells(outcome)) for name, outcome in found.items()], right=True)
    stages = {name: outcome.report.stages for name, outcome in found.items() if outcome.report is not None}
    fullest = {name: max(some, key=lambda stage: stage.peak_gib) for name, some in stages.items()}
    sizes = [(name, *(whole(one.components_gib[part]) for part in COMPONENTS)) for name, one in fullest.items()]
    return "\n\n".join([_answer(found), choices, table(("GiB of the fullest GPU", *COMPONENTS), sizes, right=True)])


def _answer(found: dict[str, Outcome]) -> str:
    fitting = [name for name, outcome in found.items() if outcome.fits]
    if not fitting:
        return "**No**: none of the choices below fits."
    name = min(fitting, key=lambda name: found[name].step_s)
    best, report = found[name], found[name].report
    assert report is not None
    return (
        f"**Yes**, in {len(fitting)} of the {len(CHOICES)} ways below. The fastest of them is *{name}* "
        f"({describe(report.layout)}): {report.peak_gib:.0f} of {report.usable_gib:.0f} GiB a GPU, "
        f"{report.host_ram_gib_per_node:.0f} of {NODE.host_ram_gib:.0f} GiB of host memory, "
        f"{report.nvme_gib_per_node:.0f} of {NODE.nvme_gib:.0f} GiB of NVMe, {human_seconds(best.step_s)} a step, "
        f"{best.days:.1f} days for {TOKENS / 1e6:.0f}M tokens."
    )


def _cells(outcome: Outcome) -> tuple[str, ...]:
    report = outcome.report
    if report is None:
        return outcome.refused, *[""] * 6
    verdict = report.verdict + ("" if outcome.fits else f": {report.binding}")
    sizes = map(whole, (report.peak_gib, report.host_ram_gib_per_node, report.nvme_gib_per_node))
    speed = (human_seconds(outcome.step_s), f"{outcome.days:.1f}") if outcome.fits else ("", "")
    return verdict, *sizes, describe(report.layout).partition(", ")[2], *speed
