"""The table of compressed exchanges in docs/deepspeed.md, from the cost model: ``python -m
benchmarks.tables.slow_links``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kit.cost.step_time import step_time_components_s
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec
from kit.specs.layout import Layout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deepspeed.md"
BEGIN, END = "<!-- generated: python -m benchmarks.tables.slow_links -->", "<!-- end of slow links -->"

CLUSTER = "64xA100-80"
LINKS = {"25 Gbit/s a node": 25 / 8 / 8, "100 Gbit/s a node": 100 / 8 / 8, "200 Gbit/s a GPU": 25.0}
"""Name → GB/s of each of a node's eight GPUs: Ethernet of a node, and an InfiniBand port a GPU."""
JOB = JobSpec(seq_length=4096, global_batch_size=256)


def _zero3(**changes: object) -> Layout:
    layout = Layout(
        engine="deepspeed",
        implementation="huggingface",
        dp=64,
        zero_stage=3,
        recompute="full",
        micro_batch_size=2,
        gradient_accumulation_steps=2,
    )
    return dataclasses.replace(layout, **changes)


def _ddp(kind: str) -> Layout:
    return Layout(
        engine="torch",
        implementation="huggingface",
        dp=64,
        recompute="full",
        micro_batch_size=4,
        gradient_compression=kind,  # type: ignore[arg-type]
    )


ROWS: tuple[tuple[str, str, Layout], ...] = (
    ("llama-3.2-1b", "DDP, fp32 gradients", _ddp("none")),
    ("llama-3.2-1b", "DDP, bf16 hook", _ddp("bf16")),
    ("llama-3.2-1b", "DDP, PowerSGD rank 4", _ddp("powersgd")),
    ("llama-3.1-8b", "ZeRO-3", _zero3()),
    ("llama-3.1-8b", "ZeRO-3, hpZ 8", _zero3(zero_hpz=8)),
    ("llama-3.1-8b", "ZeRO-3, hpZ 8, qwZ", _zero3(zero_hpz=8, zero_quantized_weights=True)),
    (
        "llama-3.1-8b",
        "ZeRO-3, hpZ 8, qwZ, qgZ",
        _zero3(zero_hpz=8, zero_quantized_weights=True, zero_quantized_gradients=True),
    ),
)


def table() -> str:
    """Markdown: seconds a step, and how many times faster than the first row of the model."""
    lines = [f"| model, exchange | {' | '.join(LINKS)} |", f"|---|{'---:|' * len(LINKS)}"]
    first: dict[tuple[str, str], float] = {}
    for model, name, layout in ROWS:
        cells = []
        for link, gbytes_per_s in LINKS.items():
            cluster = dataclasses.replace(parse_cluster(CLUSTER), inter_node_gbytes_per_s=gbytes_per_s)
            step = sum(step_time_components_s(load_model(model), cluster, JOB, layout).values())
            plain = first.setdefault((model, link), step)
            cells.append(f"{step:.2f} s" if step == plain else f"{step:.2f} s, {plain / step:.2f}x")
        lines.append(f"| {model}, {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def updated(page: str) -> str:
    """The page with its table made again."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
