"""The tables of docs/one-node-70b.md: ways to hold 70B's states on one node, by the planner."""

from __future__ import annotations

import dataclasses

import kit
from benchmarks.tables.deepspeed import pins_of
from kit.cost.memory.peak import COMPONENTS
from kit.cost.time.step import StepTimer
from kit.cost.workload import Workload
from kit.errors import PlanError
from kit.planner.request import Request
from kit.report.memory_report import FitReport, memory_report
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.layout import describe
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


CHOICES = {
    "DeepSpeed without ZeRO": pins_of(0),
    "ZeRO-1": pins_of(1),
    "ZeRO-2": pins_of(2),
    "ZeRO-3": pins_of(3),
    "FSDP2": kit.Pins(engine="torch", tp=1, zero_stage=3, offload_optimizer="none", offload_param="none"),
    "Megatron: tensor and pipeline parallelism": kit.Pins(
        engine="megatron", zero_stage=1, offload_optimizer="none", offload_param="none", optimizer_state_dtype="fp32"
    ),
    "ZeRO-1, optimizer in host memory": pins_of(1, "cpu"),
    "ZeRO-2, optimizer in host memory": pins_of(2, "cpu"),
    "ZeRO-2 over tensor parallelism of 4, optimizer in host memory": pins_of(2, "cpu", tp=4),
    "ZeRO-3, optimizer in host memory": pins_of(3, "cpu"),
    "ZeRO-3, optimizer and weights in host memory": pins_of(3, "cpu", "cpu"),
    "ZeRO-3, optimizer on NVMe": pins_of(3, "nvme"),
    "ZeRO-3, optimizer on NVMe, weights in host memory": pins_of(3, "nvme", "cpu"),
    "ZeRO-3, optimizer and weights on NVMe": pins_of(3, "nvme", "nvme"),
}
"""Name of a way → its pins, without a last resort. The planner decides the rest."""


Outcome = FitReport | str
"""A memory report of one way, or the reason for which the planner refuses it."""


def outcomes() -> dict[str, Outcome]:
    """One outcome for every choice."""
    found: dict[str, Outcome] = {}
    for name, pins in CHOICES.items():
        try:
            found[name] = memory_report(Request(model=MODEL, cluster=NODE, job=JOB, pins=pins))
        except PlanError as error:
            found[name] = str(error).splitlines()[0]
    return found


def fitting(found: dict[str, Outcome]) -> dict[str, FitReport]:
    """Those for which the GPUs, host memory and drives have room."""
    reports = {name: outcome for name, outcome in found.items() if isinstance(outcome, FitReport)}
    return {name: report for name, report in reports.items() if report.verdict != "does not fit"}


def _step_s(report: FitReport) -> float:
    return sum(StepTimer().components_s(Workload(MODEL, NODE, JOB, report.layout)).values())


def _days(report: FitReport) -> float:
    """For all tokens."""
    return TOKENS / (JOB.seq_length * JOB.global_batch_size) * _step_s(report) / 86400


def text() -> str:
    """Markdown: the answer, a table of choices, and one of what is on a GPU."""
    found = outcomes()
    heads = ("way", "verdict", "GiB a GPU", "host GiB", "NVMe GiB", "layout", "a step", "days")
    choices = table(heads, [(name, *_cells(outcome)) for name, outcome in found.items()], right=True)
    reports = {name: outcome for name, outcome in found.items() if isinstance(outcome, FitReport)}
    fullest = {name: max(report.stages, key=lambda stage: stage.peak_gib) for name, report in reports.items()}
    sizes = [(name, *(whole(one.components_gib[part]) for part in COMPONENTS)) for name, one in fullest.items()]
    return "\n\n".join([_answer(found), choices, table(("GiB of the fullest GPU", *COMPONENTS), sizes, right=True)])


def _answer(found: dict[str, Outcome]) -> str:
    name, report = min(fitting(found).items(), key=lambda entry: _step_s(entry[1]))
    return (
        f"**Yes**, in {len(fitting(found))} of the {len(CHOICES)} ways below. The fastest of them is *{name}* "
        f"({describe(report.layout)}): {report.peak_gib:.0f} of {report.usable_gib:.0f} GiB a GPU, "
        f"{report.host_ram_gib_per_node:.0f} of {NODE.host_ram_gib:.0f} GiB of host memory, "
        f"{report.nvme_gib_per_node:.0f} of {NODE.nvme_gib:.0f} GiB of NVMe, {human_seconds(_step_s(report))} a step, "
        f"{_days(report):.1f} days for {TOKENS / 1e6:.0f}M tokens."
    )


def _cells(report: Outcome) -> tuple[str, ...]:
    if isinstance(report, str):
        return report, *[""] * 6
    fits = report.verdict != "does not fit"
    verdict = report.verdict if fits else f"{report.verdict}: {report.binding}"
    sizes = map(whole, (report.peak_gib, report.host_ram_gib_per_node, report.nvme_gib_per_node))
    speed = (human_seconds(_step_s(report)), f"{_days(report):.1f}") if fits else ("", "")
    return verdict, *sizes, describe(report.layout).partition(", ")[2], *speed
