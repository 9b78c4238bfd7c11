"""A 1B plan on one device: predicted against measured, for each engine; and CUDA against CPU on the tiny recipe.

Run it by ``benchmarks/gpu/smoke.sh``. An engine that fails (out of memory, not installed) is a row that says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kit
from benchmarks import runs
from benchmarks.assets import RECIPE, ROOT, prepare
from benchmarks.gpu.machine import describe
from benchmarks.parity.compare import compare_curves, compare_gradients
from kit.emit.run_directory import write
from kit.specs.catalog import load_gpu, parse_cluster
from kit.specs.run import DataSpec, LoggingSpec, RunSpec, ScheduleSpec

ENGINES = ("torch", "deepspeed", "megatron")
STEPS = 12
PARITY_BOUND = 1e-4
"""CUDA against CPU in fp32: other kernels, other order of sums, the same arithmetic (TF32 is off)."""


def main() -> int:
    """Measure, print, write one JSON. 0 if every engine ran and the devices agree."""
    arguments = _arguments()
    began = time.monotonic()
    result: dict[str, Any] = {"machine": describe(arguments.device), "engines": [], "parity": None}
    with tempfile.TemporaryDirectory(prefix="kit-smoke-") as scratch:
        cluster = _cluster(arguments.device)
        for engine in ENGINES:
            row = measure(engine, cluster, arguments.device, Path(scratch))
            result["engines"].append(row)
            print(json.dumps(row), flush=True)
        result["parity"] = devices_agree(arguments.device, Path(scratch))
        print(json.dumps(result["parity"]), flush=True)
    result["seconds"] = round(time.monotonic() - began, 1)
    out = (
        arguments.out
        or ROOT / "benchmarks" / "results" / f"smoke-{arguments.device}-{result['machine']['date'][:10]}.json"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"{result['seconds']} s; {out.name}")
    return 0 if all(row["error"] is None for row in result["engines"]) and result["parity"]["agrees"] else 1


def measure(engine: str, cluster: kit.ClusterSpec, device: str, scratch: Path) -> dict[str, Any]:
    """Plan for one device, run a few steps with random weights and tokens, compare with the prediction."""
    row: dict[str, Any] = {"engine": engine, "error": None}
    try:
        plan = _plan(engine, cluster, device)
        data = _random_tokens(scratch, plan)
        run = RunSpec(
            data=data, steps=STEPS, schedule=ScheduleSpec(kind="constant"), logging=LoggingSpec(every_steps=1)
        )
        rundir = write(plan, run, scratch / engine)
        runs.train(rundir)
    except (kit.KitError, runs.RunFailed) as error:
        return {**row, "error": str(error)}
    summary = json.loads((rundir.path / "summary.json").read_text(encoding="utf-8"))
    return {
        **row,
        "model": plan.model.name,
        "layout": dataclasses.asdict(plan.layout),
        "seq_length": plan.job.seq_length,
        "predicted_peak_gib": plan.predicted.peak_gib,
        "predicted_step_time_s": plan.predicted.step_time_s,
        "summary": summary,
    }


def devices_agree(device: str, scratch: Path) -> dict[str, Any]:
    """The tiny recipe in fp32 by plain torch: this device against the CPU. On the CPU: against itself, bit for bit."""
    prepare()
    words = ["run.steps=10"]
    reference = runs.emit(RECIPE, scratch / "parity-cpu", words)
    other = runs.emit(
        RECIPE, scratch / f"parity-{device}-2", words if device == "cpu" else [*words, _cluster_word(device)]
    )
    runs.train(reference)
    runs.train(other)
    name = "gradients/step-000001.safetensors"
    gradients = compare_gradients(reference.path / name, other.path / name).worst_relative_error
    loss = compare_curves(runs.metrics(reference), runs.metrics(other), "loss").worst_relative_error
    bound = 0.0 if device == "cpu" else PARITY_BOUND
    return {"gradient_error": gradients, "loss_error": loss, "bound": bound, "agrees": max(gradients, loss) <= bound}


def _plan(engine: str, cluster: kit.ClusterSpec, device: str) -> kit.Plan:
    """1B at 4,096 tokens on a GPU; the tiny model on a CPU."""
    pins = kit.Pins(engine=engine)  # type: ignore[arg-type]
    if device == "cpu":
        job = kit.JobSpec(seq_length=128, global_batch_size=4, total_tokens=10**6, precision="fp32")
        return kit.plan(kit.load_recipe(RECIPE).model, cluster, job, pins)
    return kit.plan("llama-3.2-1b", cluster, kit.JobSpec(seq_length=4096, global_batch_size=8), pins)


def _random_tokens(scratch: Path, plan: kit.Plan) -> DataSpec:
    """Enough random tokens of the model's vocabulary; speed and memory do not depend on what they say."""
    from kit.training.data.indexed import IndexedWriter

    prefix = scratch / "tokens"
    if not Path(f"{prefix}.bin").exists():
        vocab_size, samples = plan.model.vocab_size, plan.job.global_batch_size * STEPS
        tokens = np.random.default_rng(0).integers(0, vocab_size, plan.job.seq_length * samples + 1)
        with IndexedWriter(prefix, tokenizer="random", vocab_size=vocab_size) as writer:
            writer.add_document(tokens.tolist())
    return DataSpec(train=str(prefix))


def _cluster(device: str) -> kit.ClusterSpec:
    return parse_cluster(_cluster_word(device).removeprefix("cluster="))


def _cluster_word(device: str) -> str:
    """``cluster=1x…`` for the GPU of this machine, by its name in the catalog."""
    if device == "cpu":
        return "cluster=1xcpu"
    import torch

    name = torch.cuda.get_device_name(0)
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    for gpu in ("H200", "H100", "A100-80", "A100-40", "RTX4090", "TitanRTX"):
        spec = load_gpu(gpu)
        if (
            gpu.split("-")[0].replace("RTX", "").lower() in name.replace(" ", "").lower()
            and abs(spec.memory_gib - memory) < 6
        ):
            return f"cluster=1x{gpu}"
    raise SystemExit(
        f"error: {name} with {memory:.0f} GiB is not in the catalog; add it to kit/specs/catalog/gpus.yaml"
    )


def _arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/smoke.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=None, help="JSON to write, instead of benchmarks/results/…")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
