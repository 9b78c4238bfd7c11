"""Load a 1B model from disk at ZeRO-3 on two processes, and export it; fail where a rank needs more than its share.

The limits: 1.3 times what a rank keeps afterwards (weights, masters, gradients, buckets) and the largest fp32 tensor;
for exporting, which every rank takes part in, two and a half such tensors (one is gathered, one is handed over).

``--qlora``: the same model frozen in four bits on one process, which may not need more than what it keeps afterwards
and the largest fp32 tensor: weights are read and quantised one by one.
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

import torch

import kit
from kit.emit.run_directory import write
from kit.engines.huggingface.models import hf_config, parameter_shapes
from kit.engines.io.sharded_safetensors import ShardWriter
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec
from kit.specs.run import DataSpec, RunSpec
from kit.units import GIB, to_gib

ROOT = Path(__file__).resolve().parents[3]
WORLD_SIZE = 2
SHARE_FACTOR = 1.3
EXPORT_FACTOR = 2.5
LIMIT_S = 1500


def main() -> int:
    """Exit code 1 where a rank needs more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.2-1b", help="a model of the catalog")
    parser.add_argument("--qlora", action="store_true", help="adapters on a base in four bits, plain torch")
    arguments = parser.parse_args()
    model = load_model(arguments.model)
    with tempfile.TemporaryDirectory(prefix="kit-loading-") as directory:
        ranks = measure(model, Path(directory), arguments.qlora)
    largest = 4 * max(torch.Size(shape).numel() for shape in parameter_shapes(model).values())
    failed = False
    for rank, found in enumerate(ranks):
        limit = (1.0 if arguments.qlora else SHARE_FACTOR) * found["kept"] + largest
        failed |= found["loading"] > limit or found["exporting"] > EXPORT_FACTOR * largest
        print(
            f"rank {rank}: keeps {to_gib(found['kept']):.2f} GiB; loading peaks at {to_gib(found['loading']):.2f} "
            f"({found['loading'] / found['kept']:.2f} times), the limit is {to_gib(limit):.2f}; "
            f"exporting adds {to_gib(found['exporting']):.2f}, the largest tensor is {to_gib(largest):.2f}"
        )
    return 1 if failed else 0


def measure(model: ModelSpec, directory: Path, qlora: bool = False) -> list[dict[str, int]]:
    """Bytes of each rank; see the worker."""
    write_model(model, directory / "model")
    world_size = 1 if qlora else WORLD_SIZE
    cluster = dataclasses.replace(parse_cluster(f"{world_size}xcpu"), gpu=_roomy())
    lora = LoraSpec(rank=16, alpha=32, four_bit=True) if qlora else None
    job = kit.JobSpec(seq_length=128, global_batch_size=world_size, total_tokens=10_000, precision="bf16", lora=lora)
    pins = kit.Pins(engine="torch" if qlora else "deepspeed", zero_stage=0 if qlora else 3, micro_batch_size=1)
    plan = kit.plan(model, cluster, job, pins)
    run = RunSpec(model_path=str(directory / "model"), data=DataSpec(train="none"))
    rundir = write(plan, run, directory / "run")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command += ["-m", "benchmarks.performance.loading.worker", str(rundir.path), str(directory / "out.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, timeout=LIMIT_S, env=environment, stdout=subprocess.DEVNULL)
    found: list[dict[str, int]] = json.loads((directory / "out.json").read_text(encoding="utf-8"))
    return found


def write_model(model: ModelSpec, directory: Path) -> None:
    """A Hugging Face directory with random bf16 weights, a tensor at a time."""
    directory.mkdir()
    hf_config(model).save_pretrained(directory)
    writer = ShardWriter(directory, "model", shard_bytes=GIB)
    generator = torch.Generator().manual_seed(0)
    for name, shape in parameter_shapes(model).items():
        writer.add(name, torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator))
    index = {"metadata": {}, "weight_map": writer.finish()}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _roomy() -> kit.GpuSpec:
    """The stand-in's 8 GiB are a convention; what counts here is the machine."""
    return dataclasses.replace(parse_cluster("1xcpu").gpu, memory_gib=64.0)


if __name__ == "__main__":
    sys.exit(main())
