"""Load a 1B model from disk at ZeRO-3 on two processes, and export it; fail where a rank needs more than its share.

The limits: 1.3 times what a rank keeps afterwards (weights, masters, gradients, buckets) and the largest fp32 tensor;
for exporting, which every rank takes part in, two and a half such tensors (one is gathered, one is handed over).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

import kit
from benchmarks.performance import weights
from benchmarks.performance.loading.worker import loaded
from kit.specs.catalog import load_model
from kit.units import to_gib
from tests.support.program import run

SHARE_FACTOR = 1.3
EXPORT_FACTOR = 2.5


def main(
    model: Annotated[str, typer.Option(help="a model of the catalog")] = "llama-3.2-1b",
) -> int:
    """Exit code 1 where a rank needs more than the limit."""
    spec = load_model(model)
    job = kit.JobSpec(seq_length=128, global_batch_size=2, total_tokens=10_000, precision="bf16")
    pins = kit.Pins(engine="deepspeed", zero_stage=3)
    with tempfile.TemporaryDirectory(prefix="kit-loading-") as scratch:
        weights.write_model(spec, Path(scratch) / "model", "bfloat16")
        ranks = weights.measure(spec, job, pins, Path(scratch), "run", loaded)
    _, largest = weights.sizes(spec)
    failed = False
    for rank, found in enumerate(ranks):
        limit = SHARE_FACTOR * found["kept"] + largest
        failed |= found["loading"] > limit or found["exporting"] > EXPORT_FACTOR * largest
        print(
            f"rank {rank}: keeps {to_gib(found['kept']):.2f} GiB; loading peaks at {to_gib(found['loading']):.2f} "
            f"({found['loading'] / found['kept']:.2f} times), the limit is {to_gib(limit):.2f}; "
            f"exporting adds {to_gib(found['exporting']):.2f}, the largest tensor is {to_gib(largest):.2f}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    run(main)
