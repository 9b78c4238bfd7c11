"""Weights in and out of Megatron layouts on two processes, beside a plain copy of the same bytes.

Fails where a rank needs more host memory than 1.2 times the largest tensor beyond what it holds anyway, or where
streaming is slower than 80 % of the plain copy, or where an offline conversion needs more than 3.2 times that tensor.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import kit
from benchmarks.performance.loading.__main__ import _roomy
from kit.emit.run_directory import write
from kit.engines.huggingface.models import hf_config, parameter_shapes
from kit.engines.io.sharded_safetensors import SafetensorsWriter, plan_files
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.model import ModelSpec
from kit.specs.run import DataSpec, RunSpec
from kit.units import GIB, to_gib

ROOT = Path(__file__).resolve().parents[3]
LAYOUTS = {
    "tp=2": {"tp": 2, "sp": True, "pp": 1},
    "dp=2, distributed optimizer": {"tp": 1, "pp": 1, "cp": 1, "zero_stage": 1},
    "pp=2": {"tp": 1, "pp": 2, "vp": 1},
}
MEMORY_FACTOR = 1.2
SPEED_FACTOR = 0.8
CONVERT_FACTOR = 3.2
"""A conversion holds one Megatron parameter, one block as it was stored, one tensor; Megatron's may be the largest."""
LIMIT_S = 900


def main() -> int:
    """Exit code 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.2-1b", help="a model of the catalog")
    parser.add_argument("--layers", type=int, default=4, help="of it")
    parser.add_argument("--layouts", default="", help="those whose name contains this")
    arguments = parser.parse_args()
    model = dataclasses.replace(load_model(arguments.model), num_layers=arguments.layers)
    shapes = parameter_shapes(model)
    largest = 4 * max(torch.Size(shape).numel() for shape in shapes.values())
    total = 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    print(
        f"{model.name} with {model.num_layers} layers in fp32: {to_gib(total):.2f} GiB, the largest tensor "
        f"{to_gib(largest):.2f} GiB; two processes\n"
    )
    print("| layout | way | streamed GiB/s | plain copy GiB/s | ratio | host memory beyond its own / largest tensor |")
    print("|---|---|---|---|---|---|")
    failed = False
    stalls = []
    with tempfile.TemporaryDirectory(prefix="kit-streaming-") as directory:
        write_model(model, shapes, Path(directory) / "model")
        chosen = {name: pins for name, pins in LAYOUTS.items() if arguments.layouts in name}
        for number, (name, pins) in enumerate(chosen.items()):
            ranks = measure(model, pins, Path(directory), f"run{number}")
            for way, times in (("import", 1), ("export", 3)):
                slowest = max(ranks, key=lambda rank: rank[way]["work_s"])[way]
                ratio = slowest["plain_s"] / slowest["work_s"]
                grown = max(rank[way]["grown"] for rank in ranks) / largest
                failed |= ratio < SPEED_FACTOR or grown > MEMORY_FACTOR
                speed, plain = (to_gib(times * total) / slowest[key] for key in ("work_s", "plain_s"))
                print(f"| {name} | {way} | {speed:.2f} | {plain:.2f} | {ratio:.2f} | {grown:.2f} |", flush=True)
            stalls.append((name, ranks[0]["native"]))
        if not arguments.layouts:
            failed |= conversions(Path(directory), total, largest)
    print("\n| layout | native checkpoint at once, s | in a thread: training stops, s | until it is on disk, s |")
    print("|---|---|---|---|")
    for name, native in stalls:
        print(f"| {name} | {native['at_once_s']:.1f} | {native['stall_s']:.1f} | {native['thread_s']:.1f} |")
    return 1 if failed else 0


def conversions(directory: Path, total: int, largest: int) -> bool:
    """``kit convert`` from format to format, offline in one process: prints a table, True where it holds too much."""
    print("\n| offline | GiB/s of weights | host memory / largest tensor |")
    print("|---|---|---|")
    failed = False
    for before, after in (("model", "megatron"), ("megatron", "hf"), ("hf", "hub"), ("hub", "megatron")):
        source, out = directory / before, directory / ("again" if before == "hub" else after)
        command = [sys.executable, "-m", "benchmarks.performance.streaming.converting", str(source), after, str(out)]
        command.append(str(directory / "model"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(command, check=True, timeout=LIMIT_S, env=environment, stdout=subprocess.PIPE, text=True)
        found = json.loads(ran.stdout.splitlines()[-1])
        grown = found["grown"] / largest
        failed |= grown > CONVERT_FACTOR
        words = "Hugging Face" if before == "model" else before
        print(f"| {words} → {after} | {to_gib(total) / found['seconds']:.2f} | {grown:.2f} |", flush=True)
    return failed


def measure(model: ModelSpec, pins: dict[str, Any], directory: Path, name: str) -> list[dict[str, Any]]:
    """What each rank found; see the worker."""
    cluster = dataclasses.replace(parse_cluster("2xcpu"), gpu=_roomy())
    job = kit.JobSpec(seq_length=128, global_batch_size=2, total_tokens=10_000, precision="fp32")
    plan = kit.plan(model, cluster, job, kit.Pins(engine="megatron", micro_batch_size=1, **pins))
    rundir = write(plan, RunSpec(model_path=str(directory / "model"), data=DataSpec(train="none")), directory / name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        "-m",
        "benchmarks.performance.streaming.worker",
        str(rundir.path),
        str(directory / "scratch"),
        str(directory / "o"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, timeout=LIMIT_S, env=environment, stdout=subprocess.DEVNULL)
    found: list[dict[str, Any]] = json.loads((directory / "o").read_text(encoding="utf-8"))
    return found


def write_model(model: ModelSpec, shapes: dict[str, tuple[int, ...]], directory: Path) -> None:
    """A Hugging Face directory with random fp32 weights, a tensor at a time."""
    directory.mkdir()
    hf_config(model).save_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(plan_files(shapes, shapes, 4, GIB)):
        file = f"model-{number:05d}.safetensors"
        writer = SafetensorsWriter(directory / file, {name: (torch.float32, shapes[name]) for name in names})
        for name in names:
            writer.write(name, torch.empty(shapes[name]).normal_(0, 0.02, generator=generator))
        writer.finish()
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
