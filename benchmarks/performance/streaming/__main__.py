"""Weights into and out of four layouts on two processes, and from format to format by one.

Fails where a rank needs more host memory than its limit: to load, a multiple of what it keeps and the largest tensor in
fp32, because DeepSpeed converts its masters and then clones them (stage3.py); to save, a tenth of that tensor; offline,
a multiple of it.
"""

from __future__ import annotations

import dataclasses
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import torch
import typer

import kit
from benchmarks.performance.streaming.worker import converted, streamed
from kit.emit.run_directory import write
from kit.engines.megatron.weights.random import RandomSource
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.run import DataSpec, RunSpec
from kit.training.checkpoint.to_huggingface import write_hf
from kit.units import GIB, to_gib
from tests.support.page import row, table
from tests.support.parameter_shapes import parameter_shapes
from tests.support.program import run
from tests.support.workers import pool

MEGATRON = kit.Pins(engine="megatron")
LAYOUTS = {
    "ZeRO-3": kit.Pins(engine="deepspeed", zero_stage=3, offload_optimizer="none"),
    "Megatron tp=2": MEGATRON.but(tp=2, sp=True, pp=1),
    "Megatron dp=2, distributed optimizer": MEGATRON.but(tp=1, pp=1, cp=1, zero_stage=1),
    "Megatron pp=2": MEGATRON.but(tp=1, pp=2, vp=1),
}
LOAD = {"deepspeed": 1.3, "megatron": 1.1}
"""Engine → most bytes while weights are loaded, over those that a rank keeps; beside one tensor."""
SAVE = 0.1
"""Most bytes while a checkpoint is written, over the largest tensor: what is written is what a rank holds."""
CONVERT = 3.2
"""A conversion holds one Megatron parameter, one block as it was stored, one tensor; Megatron's may be the largest."""


def main(
    model_name: Annotated[str, typer.Option("--model", help="a model of the catalog")] = "llama-3.2-1b",
    layers: Annotated[int, typer.Option(help="of it")] = 4,
) -> int:
    """Exit code 1 where a limit is missed."""
    model = dataclasses.replace(load_model(model_name), num_layers=layers)
    numbers = [4 * torch.Size(shape).numel() for shape in parameter_shapes(model).values()]
    total, largest = sum(numbers), max(numbers)
    print(f"{model.name}, {layers} layers in fp32: {to_gib(total):.2f} GiB, the largest tensor {to_gib(largest):.2f}\n")
    job = kit.JobSpec(seq_length=128, global_batch_size=2, total_tokens=10_000, precision="bf16")
    cluster = parse_cluster("2xcpu")
    # The stand-in's 8 GiB are a convention; what counts here is the machine.
    cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, memory_gib=64.0))
    heads = ("layout", "keeps, GiB", "loading, GiB", "limit", "GiB/s", "saving / largest tensor", "GiB/s")
    print(table(heads, []))
    failed = False
    with tempfile.TemporaryDirectory(prefix="kit-streaming-") as scratch:
        directory = Path(scratch)
        write_hf(model, RandomSource(model, seed=0), directory / "model", "float32", shard_bytes=GIB)
        for number, (name, pins) in enumerate(LAYOUTS.items()):
            plan = kit.plan(model, cluster, job, pins.but(micro_batch_size=1))
            wanted = RunSpec(model_path=str(directory / "model"), data=DataSpec(train="none"))
            processes = pool(plan.layout.engine, cluster.num_gpus)
            ranks = processes.run(streamed, write(plan, wanted, directory / f"run{number}"), timeout_s=1500)
            processes.close()
            worst = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
            limit = LOAD[plan.layout.engine] * worst["kept"] + largest
            failed |= worst["loading"] > limit or worst["saving"] > SAVE * largest
            gib = (f"{to_gib(worst['kept']):.2f}", f"{to_gib(worst['loading']):.2f}", f"{to_gib(limit):.2f}")
            speeds = [f"{to_gib(times * total) / worst[key]:.2f}" for times, key in ((1, "load_s"), (3, "save_s"))]
            print(row((name, *gib, speeds[0], f"{worst['saving'] / largest:.2f}", speeds[1])), flush=True)
        failed |= conversions(directory, total, largest)
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
        failed |= grown > CONVERT * largest
        words = "Hugging Face" if before == "model" else before
        print(row((f"{words} → {after}", f"{to_gib(total) / seconds:.2f}", f"{grown / largest:.2f}")), flush=True)
    return failed


if __name__ == "__main__":
    run(main)
