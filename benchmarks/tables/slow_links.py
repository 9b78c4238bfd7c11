"""The table of docs/deepspeed.md on slow links: what compressed collectives gain, by the cost model."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.page import table
from kit.cost.time.step import step_time_components_s
from kit.cost.workload import Workload
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec
from kit.specs.layout import Layout

CLUSTER = "64xA100-80"
LINKS = {"25 Gbit/s a node": 25 / 8 / 8, "100 Gbit/s a node": 100 / 8 / 8, "200 Gbit/s a GPU": 25.0}
"""Name → GB/s of each of a node's eight GPUs: Ethernet of a node, and an InfiniBand port a GPU."""
JOB = JobSpec(seq_length=4096, global_batch_size=256)
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


def text() -> str:
    """Markdown: seconds a step, and how many times faster than the first row of the model."""
    rows = []
    first: dict[tuple[str, str], float] = {}
    for model, name, layout, changes in ROWS:
        cells = []
        for link, gbytes_per_s in LINKS.items():
            cluster = dataclasses.replace(parse_cluster(CLUSTER), inter_node_gbytes_per_s=gbytes_per_s)
            changed = dataclasses.replace(layout, **changes)
            step = sum(step_time_components_s(Workload(load_model(model), cluster, JOB, changed)).values())
            plain = first.setdefault((model, link), step)
            cells.append(f"{step:.2f} s" if step == plain else f"{step:.2f} s, {plain / step:.2f}x")
        rows.append((f"{model}, {name}", *cells))
    return table(("model, collectives", *LINKS), rows, right=True)
