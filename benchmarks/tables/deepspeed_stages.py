"""The table of docs/deepspeed.md, from the planner: ``python -m benchmarks.tables.deepspeed_stages``. Imports no
engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import kit
from kit.cost.memory import peak_gib
from kit.errors import PlanError
from kit.planner.weighing import search
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.layout import Offload
from kit.units import human_count

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deepspeed.md"
BEGIN, END = "<!-- generated: python -m benchmarks.tables.deepspeed_stages -->", "<!-- end -->"

JOB = kit.JobSpec(seq_length=4096, global_batch_size=256)
PLACES = (("llama-3.2-1b", "8xA100-40"), ("llama-3.1-8b", "8xA100-40"), ("llama-3.1-8b", "1xA100-40"))
PLACES += (("llama-3-70b", "8xA100-80"), ("llama-3-70b", "64xA100-80"))


@dataclass(frozen=True)
class Choice:
    """One stage with its offload."""

    stage: int
    optimizer: Offload = "none"
    param: Offload = "none"

    @property
    def name(self) -> str:
        """``3, optimizer nvme, weights cpu``."""
        parts = [f"{self.stage}"]
        parts += [f"optimizer {self.optimizer}"] if self.optimizer != "none" else []
        parts += [f"weights {self.param}"] if self.param != "none" else []
        return ", ".join(parts)


CHOICES = (
    Choice(0),
    Choice(1),
    Choice(2),
    Choice(3),
    Choice(2, "cpu"),
    Choice(3, "cpu"),
    Choice(3, "cpu", "cpu"),
    Choice(3, "nvme"),
    Choice(3, "nvme", "nvme"),
)


def row(model: str, gpus: str, choice: Choice) -> str:
    """One line of the table: what the best layout of that stage needs and gives, or by how much it does not fit."""
    pins = kit.Pins(
        engine="deepspeed",
        implementation="huggingface",
        zero_stage=choice.stage,
        offload_optimizer=choice.optimizer,
        offload_param=choice.param,
    )
    head = f"| {choice.name} |"
    try:
        plan = kit.plan(model, gpus, JOB, pins)
    except PlanError as error:
        return f"{head} {_least(model, gpus, pins) or _short(str(error))} | | | | |"
    predicted, layout = plan.predicted, plan.layout
    speed = human_count(predicted.tokens_per_s / plan.cluster.num_gpus)
    cells = [f"{predicted.peak_gib:.0f}", _gib(predicted.host_ram_gib_per_node), _gib(predicted.nvme_gib_per_node)]
    return f"{head} {' | '.join(cells)} | {layout.micro_batch_size}, {layout.recompute} | {speed} |"


def _least(model: str, gpus: str, pins: kit.Pins) -> str:
    spec, cluster = load_model(model), parse_cluster(gpus)
    considered = search(spec, cluster, JOB, pins).considered
    if not considered:
        return ""
    return f"needs {min(peak_gib(spec, cluster, JOB, each.layout) for each in considered):.0f}"


def _short(message: str) -> str:
    """The part of a broken rule that a table has room for."""
    return "host memory" if "host memory" in message else message.splitlines()[0]


def _gib(gib: float) -> str:
    return f"{gib:.0f}" if gib >= 0.5 else ""


def tables() -> str:
    """Markdown: a table a model and machine."""
    lines: list[str] = []
    for model, gpus in PLACES:
        cluster = parse_cluster(gpus)
        host, disk = cluster.host_ram_gib, cluster.nvme_gib
        lines += [
            f"### {model} on {gpus}",
            "",
            f"A node has {host:.0f} GiB of host memory and {disk:.0f} GiB of NVMe.",
            "",
            "| stage | GiB a GPU | host GiB a node | NVMe GiB a node | micro batch, recompute | tokens/s a GPU |",
            "|---|---:|---:|---:|---|---:|",
            *(row(model, gpus, choice) for choice in CHOICES),
            "",
        ]
    return "\n".join(lines)


def updated(page: str) -> str:
    """The page with its tables made again."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
