"""The tables of docs/one-node-70b.md, from the planner: ``python -m benchmarks.tables.one_node_70b``. Imports no
engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import kit
from kit.cost.memory import COMPONENTS
from kit.cost.prediction import StageMemory
from kit.cost.step_time import step_time_components_s
from kit.errors import PlanError
from kit.planner.describe import describe
from kit.planner.memory_report import FitReport, memory_report
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.layout import EngineName, Implementation, Offload
from kit.units import GIB, human_seconds

PAGE = Path(__file__).resolve().parents[2] / "docs" / "one-node-70b.md"
BEGIN, END = "<!-- generated: python -m benchmarks.tables.one_node_70b -->", "<!-- end -->"

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


@dataclass(frozen=True)
class Choice:
    """One way to hold the states; what it leaves open the planner decides."""

    name: str
    engine: EngineName
    stage: int
    optimizer: Offload = "none"
    param: Offload = "none"
    tp: int | None = None
    """DeepSpeed's ZeRO over this much tensor parallelism of Megatron's layers; torch: FSDP2 alone where 1."""

    @property
    def pins(self) -> kit.Pins:
        """The same for the planner."""
        layers: Implementation = "local" if self.tp else "huggingface"
        return kit.Pins(
            engine=self.engine,
            implementation=layers if self.engine == "deepspeed" else None,
            tp=self.tp,
            zero_stage=self.stage,
            offload_optimizer=self.optimizer,
            offload_param=self.param,
        )


CHOICES = (
    Choice("ZeRO-0 (plain data parallelism)", "deepspeed", 0),
    Choice("ZeRO-1", "deepspeed", 1),
    Choice("ZeRO-2", "deepspeed", 2),
    Choice("ZeRO-3", "deepspeed", 3),
    Choice("FSDP2 (torch), as ZeRO-3", "torch", 3, tp=1),
    Choice("Megatron: tensor and pipeline parallelism", "megatron", 1),
    Choice("ZeRO-1, optimizer in host memory", "deepspeed", 1, "cpu"),
    Choice("ZeRO-2, optimizer in host memory", "deepspeed", 2, "cpu"),
    Choice("ZeRO-2 over tensor parallelism of 4, optimizer in host memory", "deepspeed", 2, "cpu", tp=4),
    Choice("ZeRO-3, optimizer in host memory", "deepspeed", 3, "cpu"),
    Choice("ZeRO-3, optimizer and weights in host memory", "deepspeed", 3, "cpu", "cpu"),
    Choice("ZeRO-3, optimizer on NVMe", "deepspeed", 3, "nvme"),
    Choice("ZeRO-3, optimizer on NVMe, weights in host memory", "deepspeed", 3, "nvme", "cpu"),
    Choice("ZeRO-3, optimizer and weights on NVMe", "deepspeed", 3, "nvme", "nvme"),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a choice: a report, or why there is none."""

    choice: Choice
    report: FitReport | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """On the GPUs and on the node."""
        return self.report is not None and self.report.verdict != "does not fit"

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step; infinite where it does not run."""
        if self.report is None or not self.fits:
            return float("inf")
        return sum(step_time_components_s(MODEL, NODE, JOB, self.report.layout).values())

    @property
    def days(self) -> float:
        """For all tokens."""
        return TOKENS / (JOB.seq_length * JOB.global_batch_size) * self.step_s / 86400


def outcomes() -> list[Outcome]:
    """One of every choice."""
    found = []
    for choice in CHOICES:
        try:
            found.append(Outcome(choice, memory_report(MODEL, NODE, JOB, choice.pins)))
        except PlanError as error:
            found.append(Outcome(choice, None, str(error).splitlines()[0]))
    return found


def tables() -> str:
    """Markdown: the answer, a table of choices, and one of what is on a GPU."""
    found = outcomes()
    fitting = sorted((outcome for outcome in found if outcome.fits), key=lambda outcome: outcome.step_s)
    return "\n".join([_answer(fitting), "", *_choices(found), "", *_components(found)])


def _answer(fitting: list[Outcome]) -> str:
    if not fitting:
        return "**No**: none of the choices below fits."
    best = fitting[0]
    assert best.report is not None
    return (
        f"**Yes**, in {len(fitting)} of the {len(CHOICES)} ways below. The fastest of them is *{best.choice.name}* "
        f"({describe(best.report.layout)}): {best.report.peak_gib:.0f} of {best.report.usable_gib:.0f} GiB a GPU, "
        f"{best.report.host_ram_gib_per_node:.0f} of {NODE.host_ram_gib:.0f} GiB of host memory, "
        f"{best.report.nvme_gib_per_node:.0f} of {NODE.nvme_gib:.0f} GiB of NVMe, {human_seconds(best.step_s)} a step, "
        f"{best.days:.1f} days for {TOKENS / 1e6:.0f}M tokens."
    )


def _choices(found: list[Outcome]) -> list[str]:
    lines = [
        "| states | verdict | GiB a GPU | host GiB | NVMe GiB | layout | a step | days |",
        "|---|---|---:|---:|---:|---|---:|---:|",
    ]
    for outcome in found:
        report = outcome.report
        if report is None:
            lines.append(f"| {outcome.choice.name} | {outcome.refused} | | | | | | |")
            continue
        verdict = report.verdict + ("" if outcome.fits else f": {report.binding}")
        cells = [f"{report.peak_gib:.0f}", _gib(report.host_ram_gib_per_node), _gib(report.nvme_gib_per_node)]
        speed = [human_seconds(outcome.step_s), f"{outcome.days:.1f}"] if outcome.fits else ["", ""]
        layout = describe(report.layout).partition(", ")[2]
        lines.append(f"| {outcome.choice.name} | {verdict} | {' | '.join([*cells, layout, *speed])} |")
    return lines


def _components(found: list[Outcome]) -> list[str]:
    lines = ["| GiB of the fullest GPU | " + " | ".join(COMPONENTS) + " |", "|---|" + "---:|" * len(COMPONENTS)]
    for outcome in found:
        if outcome.report is None:
            continue
        fullest: StageMemory = max(outcome.report.stages, key=lambda stage: stage.peak_gib)
        sizes = " | ".join(_gib(fullest.components_gib[name]) for name in COMPONENTS)
        lines.append(f"| {outcome.choice.name} | {sizes} |")
    return lines


def _gib(gib: float) -> str:
    return f"{gib:.0f}" if gib >= 0.5 else ""


def updated(page: str) -> str:
    """The page with its tables made again."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
