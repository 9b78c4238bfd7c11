"""The tables of docs/notes/deepspeed.md: each ZeRO stage with its offload on five machines; compressed collectives
on slow links."""

from __future__ import annotations

import dataclasses
from typing import Any

import kit
from kit.cost.memory.peak import peak_gib
from kit.cost.time.step import StepTimer
from kit.cost.workload import Workload
from kit.errors import PlanError
from kit.planner.request import Request
from kit.planner.search import search
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.layout import Layout, Offload
from kit.units import human_count
from tests.support.page import table, whole

JOB = kit.JobSpec(seq_length=4096, global_batch_size=256)
PLACES = (
    *(("llama-3.2-1b", "8xA100-40"), ("llama-3.1-8b", "8xA100-40"), ("llama-3.1-8b", "1xA100-40")),
    *(("llama-3-70b", "8xA100-80"), ("llama-3-70b", "64xA100-80")),
)
HEADS = ("stage", "GiB a GPU", "host GiB a node", "NVMe GiB a node", "micro batch, recompute", "tokens/s a GPU")


def pins_of(stage: int, optimizer: Offload = "none", param: Offload = "none", tp: int | None = None) -> kit.Pins:
    """``tp``: ZeRO over this much tensor parallelism of Megatron's layers."""
    return kit.Pins(
        engine="deepspeed",
        implementation="local" if tp else "huggingface",
        tp=tp,
        zero_stage=stage,
        offload_optimizer=optimizer,
        offload_param=param,
        optimizer_state_dtype="fp32",  # no last resort
    )


CHOICES = {
    **{str(stage): pins_of(stage) for stage in range(4)},
    "2, optimizer cpu": pins_of(2, "cpu"),
    "3, optimizer cpu": pins_of(3, "cpu"),
    "3, optimizer cpu, weights cpu": pins_of(3, "cpu", "cpu"),
    "3, optimizer nvme": pins_of(3, "nvme"),
    "3, optimizer nvme, weights nvme": pins_of(3, "nvme", "nvme"),
}


def stages() -> str:
    """Markdown: a table a model and machine."""
    parts = []
    for model, gpus in PLACES:
        node = parse_cluster(gpus)
        room = f"A node has {node.host_ram_gib:.0f} GiB of host memory and {node.nvme_gib:.0f} GiB of NVMe."
        rows = [(name, *_cells(model, gpus, pins)) for name, pins in CHOICES.items()]
        parts += [f"### {model} on {gpus}", room, table(HEADS, rows, right=True)]
    return "\n\n".join(parts)


def _cells(model: str, gpus: str, pins: kit.Pins) -> tuple[str, ...]:
    """What the best layout of that stage needs and gives, or by how much it does not fit."""
    try:
        plan = kit.plan(model, gpus, JOB, pins)
    except PlanError as error:
        broken = "host memory" if "host memory" in str(error) else str(error).splitlines()[0]
        return _least(model, gpus, pins) or broken, "", "", "", ""
    predicted, layout = plan.predicted, plan.layout
    sizes = predicted.peak_gib, predicted.host_ram_gib_per_node, predicted.nvme_gib_per_node
    speed = human_count(predicted.tokens_per_s / plan.cluster.num_gpus)
    return *map(whole, sizes), f"{layout.micro_batch_size}, {layout.recompute}", speed


def _least(model: str, gpus: str, pins: kit.Pins) -> str:
    spec, cluster = load_model(model), parse_cluster(gpus)
    considered = search(Request(model=spec, cluster=cluster, job=JOB, pins=pins)).considered
    if not considered:
        return ""
    return f"needs {min(peak_gib(Workload(spec, cluster, JOB, each.layout)) for each in considered):.0f}"


CLUSTER = "64xA100-80"
LINKS = {"25 Gbit/s a node": 25 / 8 / 8, "100 Gbit/s a node": 100 / 8 / 8, "200 Gbit/s a GPU": 25.0}
"""Name → GB/s of each of a node's eight GPUs: Ethernet of a node, and an InfiniBand port a GPU."""
_SAME: dict[str, Any] = {"implementation": "huggingface", "dp": 64, "recompute": "full"}
_DDP = Layout(engine="torch", micro_batch_size=4, **_SAME)
_ZERO3 = Layout(engine="deepspeed", zero_stage=3, micro_batch_size=2, gradient_accumulation_steps=2, **_SAME)

ROWS: tuple[tuple[str, str, Layout, dict[str, Any]], ...] = (
    ("llama-3.2-1b", "DDP, fp32 gradients", _DDP, {}),
    ("llama-3.2-1b", "DDP, bf16 hook", _DDP, {"gradient_compression": "bf16"}),
    ("llama-3.2-1b", "DDP, PowerSGD rank 4", _DDP, {"gradient_compression": "powersgd"}),
    ("llama-3.1-8b", "ZeRO-3", _ZERO3, {}),
    ("llama-3.1-8b", "ZeRO-3, hpZ 8", _ZERO3, {"zero_hpz": 8}),
    ("llama-3.1-8b", "ZeRO-3, hpZ 8, qwZ", _ZERO3, {"zero_hpz": 8, "zero_quantized_weights": True}),
    (
        "llama-3.1-8b",
        "ZeRO-3, hpZ 8, qwZ, qgZ",
        _ZERO3,
        {"zero_hpz": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True},
    ),
)
"""(model, name, layout, what is changed in it)."""


def slow_links() -> str:
    """Markdown: seconds a step, and how many times faster than the first row of the model."""
    rows = []
    first: dict[tuple[str, str], float] = {}
    for model, name, layout, changes in ROWS:
        cells = []
        for link, gbytes_per_s in LINKS.items():
            cluster = dataclasses.replace(parse_cluster(CLUSTER), inter_node_gbytes_per_s=gbytes_per_s)
            changed = dataclasses.replace(layout, **changes)
            step = sum(StepTimer().components_s(Workload(load_model(model), cluster, JOB, changed)).values())
            plain = first.setdefault((model, link), step)
            cells.append(f"{step:.2f} s" if step == plain else f"{step:.2f} s, {plain / step:.2f}x")
        rows.append((f"{model}, {name}", *cells))
    return table(("model, collectives", *LINKS), rows, right=True)
