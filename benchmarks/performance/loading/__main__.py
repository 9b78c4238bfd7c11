"""Load a 1B model from disk at ZeRO-3 on two processes, and export it; fail where a rank needs more than its share.

The limits: 1.3 times what a rank keeps afterwards (weights, masters, gradients, buckets) and the largest fp32 tensor;
for exporting, which every rank takes part in, two and a half such tensors (one is gathered, one is handed over).

``--qlora``: the same model frozen in four bits on one process, which may not need more than what it keeps afterwards
and the largest fp32 tensor: weights are read and quantised one by one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

import kit
from benchmarks.performance import weights
from kit.specs.catalog import load_model
from kit.specs.job import LoraSpec
from kit.units import to_gib

SHARE_FACTOR = 1.3
EXPORT_FACTOR = 2.5


def main() -> int:
    """Exit code 1 where a rank needs more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b", help="a model of the catalog")
    parser.add_argument("--qlora", action="store_true", help="adapters on a base in four bits, plain torch")
    arguments = parser.parse_args()
    model, qlora = load_model(arguments.model), arguments.qlora
    lora = LoraSpec(rank=16, alpha=32, four_bit=True) if qlora else None
    batch = 1 if qlora else 2
    job = kit.JobSpec(seq_length=128, global_batch_size=batch, total_tokens=10_000, precision="bf16", lora=lora)
    pins = kit.Pins(engine="torch", zero_stage=0) if qlora else kit.Pins(engine="deepspeed", zero_stage=3)
    with tempfile.TemporaryDirectory(prefix="kit-loading-") as scratch:
        weights.write_model(model, Path(scratch) / "model", torch.bfloat16)
        ranks = weights.measure(model, job, pins, Path(scratch), "run", "benchmarks.performance.loading.worker")
    _, largest = weights.sizes(model)
    failed = False
    for rank, found in enumerate(ranks):
        limit = (1.0 if qlora else SHARE_FACTOR) * found["kept"] + largest
        failed |= found["loading"] > limit or found["exporting"] > EXPORT_FACTOR * largest
        print(
            f"rank {rank}: keeps {to_gib(found['kept']):.2f} GiB; loading peaks at {to_gib(found['loading']):.2f} "
            f"({found['loading'] / found['kept']:.2f} times), the limit is {to_gib(limit):.2f}; "
            f"exporting adds {to_gib(found['exporting']):.2f}, the largest tensor is {to_gib(largest):.2f}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
