"""Weights in and out of Megatron layouts on two processes, beside a plain copy of the same bytes.

Fails where a rank needs more host memory than 1.2 times the largest tensor beyond what it holds anyway, or where
streaming is slower than 80 % of the plain copy, or where an offline conversion needs more than 3.2 times that tensor.
"""

from __future__ import annotations

import dataclasses
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

import kit
from benchmarks.performance import weights
from benchmarks.performance.streaming.converting import converted
from benchmarks.performance.streaming.worker import streamed
from kit.specs.catalog import load_model
from kit.units import to_gib
from tests.support.page import row, table
from tests.support.program import run

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp=2": {"tp": 2, "sp": True, "pp": 1},
    "dp=2, distributed optimizer": {"tp": 1, "pp": 1, "cp": 1, "zero_stage": 1},
    "pp=2": {"tp": 1, "pp": 2, "vp": 1},
}
MEMORY_FACTOR = 1.2
SPEED_FACTOR = 0.8
CONVERT_FACTOR = 3.2
"""A conversion holds one Megatron parameter, one block as it was stored, one tensor; Megatron's may be the largest."""


def main(
    model_name: Annotated[str, typer.Option("--model", help="a model of the catalog")] = "llama-3.2-1b",
    layers: Annotated[int, typer.Option(help="of it")] = 4,
) -> int:
    """Exit code 1 where a limit is missed."""
    model = dataclasses.replace(load_model(model_name), num_layers=layers)
    total, largest = weights.sizes(model)
    print(
        f"{model.name} with {model.num_layers} layers in fp32: {to_gib(total):.2f} GiB, the largest tensor "
        f"{to_gib(largest):.2f} GiB; two processes\n"
    )
    job = kit.JobSpec(seq_length=128, global_batch_size=2, total_tokens=10_000, precision="fp32")
    heads = ("layout", "way", "streamed GiB/s", "plain copy GiB/s", "ratio", "host memory / largest tensor")
    print(table(heads, []))
    failed = False
    with tempfile.TemporaryDirectory(prefix="kit-streaming-") as directory:
        weights.write_model(model, Path(directory) / "model", "float32")
        for number, (name, layout) in enumerate(LAYOUTS.items()):
            pins = kit.Pins(engine="megatron", **layout)
            ranks = weights.measure(model, job, pins, Path(directory), f"run{number}", streamed)
            for way, times in (("import", 1), ("export", 3)):
                slowest = max(ranks, key=lambda rank: rank[way]["work_s"])[way]
                ratio = slowest["plain_s"] / slowest["work_s"]
                grown = max(rank[way]["grown"] for rank in ranks) / largest
                failed |= ratio < SPEED_FACTOR or grown > MEMORY_FACTOR
                speed, plain = (to_gib(times * total) / slowest[key] for key in ("work_s", "plain_s"))
                figures = (f"{each:.2f}" for each in (speed, plain, ratio, grown))
                print(row((name, way, *figures)), flush=True)
        failed |= conversions(Path(directory), total, largest)
    return 1 if failed else 0


def conversions(directory: Path, total: int, largest: int) -> bool:
    """``kit convert`` from format to format, offline in one process: prints a table, True where it holds too much."""
    print()
    print(table(("offline", "GiB/s of weights", "host memory / largest tensor"), []))
    failed = False
    for before, after in (("model", "megatron"), ("megatron", "hf"), ("hf", "step"), ("step", "megatron")):
        source, out = directory / before, directory / ("again" if before == "step" else after)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            of = directory / "model" if before == "megatron" else None
            seconds, grown = process.submit(converted, source, after, out, of).result()
        failed |= grown > CONVERT_FACTOR * largest
        words = "Hugging Face" if before == "model" else before
        print(row((f"{words} → {after}", f"{to_gib(total) / seconds:.2f}", f"{grown / largest:.2f}")), flush=True)
    return failed


if __name__ == "__main__":
    run(main)
