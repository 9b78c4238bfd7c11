"""Measures one case: plans, builds the engine, runs a few steps on random tokens, and compares with the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import kit
from benchmarks.gpu.cases import BY_NAME, planned
from kit.cost.hardware import peak_flops_per_s
from kit.cost.model.flops import model_flops_per_token
from kit.emit.run_directory import RunDirectory, write
from kit.engines import build_engine
from kit.engines.protocol import Engine, MicroBatch
from kit.specs.run import DataSpec, RunSpec
from kit.training.__main__ import process_group
from kit.training.data.loader import pin
from kit.units import to_gib
from tests.support.host_syncs import waits_on_this_device

STEPS, WARM_UP = 8, 3
"""The first steps compile, choose kernels and grow the allocator's pools."""
LEARNING_RATE = 1e-5


def measure(name: str, device: str, scratch: Path) -> dict[str, Any]:
    """The row of a case. Raises KitError if the case cannot be planned or built."""
    case = BY_NAME[name]
    plan = planned(case, device, scratch)
    began = time.monotonic()
    with built_engine(run_directory(plan, scratch)) as engine:
        built_s = time.monotonic() - began
        times, loss = engine_steps(engine, plan)
        memory = measured_memory(engine, device)
        waits = waits_on_this_device(engine, batches(plan, STEPS), device)
    row = described(plan) | beside_prediction(plan, times, memory) | {"built_s": built_s, "last_loss": loss}
    return row | {"waits": sum(waits.values()), "waits_at": dict(waits.most_common(8))}


@contextlib.contextmanager
def built_engine(rundir: RunDirectory) -> Iterator[Engine]:
    """The engine of a run directory in its own process group; closes both at the end."""
    with process_group(rundir), contextlib.closing(build_engine(rundir)) as engine:
        yield engine


def run_directory(plan: kit.Plan, scratch: Path, **run: Any) -> RunDirectory:
    """A run directory in ``scratch``. For LoRA it also writes random base weights."""
    if plan.job.lora is not None:
        run["model_path"] = str(random_weights(plan, scratch.parent / "weights"))
    if "nvme" in (plan.layout.offload_optimizer, plan.layout.offload_param):
        (scratch / "disk").mkdir(exist_ok=True)
        run["nvme_path"] = str(scratch / "disk")
    settings: dict[str, Any] = {"data": DataSpec(train=str(scratch / "tokens")), "steps": STEPS, **run}
    return write(plan, RunSpec(**settings), scratch / "run")


def random_weights(plan: kit.Plan, directory: Path) -> Path:
    """A Hugging Face directory with 16-bit random weights of the plan's shape; written once for all cases."""
    found = directory / plan.model.name
    if not found.exists():
        attempt = found.with_suffix(".incomplete")
        random_model(plan, torch.bfloat16).save_pretrained(attempt)
        attempt.rename(found)
        if plan.cluster.gpu.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return found


def random_model(plan: kit.Plan, dtype: torch.dtype) -> Any:
    """A transformers model of the plan's shape, on the plan's device."""
    from transformers import AutoModelForCausalLM

    from kit.engines.huggingface.models import hf_config

    with torch.device(plan.cluster.gpu.device):
        return AutoModelForCausalLM.from_config(hf_config(plan.model), dtype=dtype)


def random_batches(plan: kit.Plan, step: int) -> list[MicroBatch]:
    """A step's micro batches of random tokens; speed and memory do not depend on the tokens."""
    generator = torch.Generator().manual_seed(step)
    shape = (plan.layout.micro_batch_size, plan.job.seq_length + 1)
    drawn = [
        torch.randint(0, plan.model.vocab_size, shape, generator=generator)
        for _ in range(plan.layout.gradient_accumulation_steps)
    ]
    return [MicroBatch(input_ids=tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous()) for tokens in drawn]


def batches(plan: kit.Plan, step: int) -> list[MicroBatch]:
    """A step's micro batches as kit's loop gives them to an engine: with a GPU in pinned memory."""
    drawn = random_batches(plan, step)
    return [pin(batch) for batch in drawn] if plan.cluster.gpu.device == "cuda" else drawn


def engine_steps(engine: Engine, plan: kit.Plan) -> tuple[list[float], float]:
    """(seconds of every step, mean loss of the last) of the engine alone, without kit's loop."""
    last = 0.0

    def one(step: int) -> None:
        nonlocal last
        last = engine.forward_backward(batches(plan, step)).mean
        engine.apply(LEARNING_RATE)

    return timed_steps(one, plan.cluster.gpu.device), last


def timed_steps(one: Callable[[int], None], device: str, steps: int = STEPS) -> list[float]:
    """Seconds of each call, with the device synchronised."""
    ends = [now(device)]
    for step in range(steps):
        one(step)
        ends.append(now(device))
    return [after - before for before, after in itertools.pairwise(ends)]


def now(device: str) -> float:
    """Clock in seconds, after synchronising the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measured_memory(engine: Engine | None, device: str) -> dict[str, Any]:
    """Peak memory of this process so far, and bytes on disk; on a CPU the engine's memory between steps."""
    held = engine.memory_bytes() if engine is not None else {}
    swapped = {"on_disk_gib": to_gib(held["nvme"])} if held.get("nvme") else {}
    if device == "cuda":
        return {
            "measured_allocated_gib": to_gib(torch.cuda.max_memory_allocated()),
            "measured_reserved_gib": to_gib(torch.cuda.max_memory_reserved()),
            **swapped,
        }
    return {"measured_held_gib": to_gib(sum(held.values())), **swapped}


def described(plan: kit.Plan) -> dict[str, Any]:
    """Describes the work that was measured."""
    default = type(plan.layout)(engine=plan.layout.engine, implementation=plan.layout.implementation)
    chosen = dataclasses.asdict(plan.layout)
    return {
        "model": plan.model.name,
        "seq_length": plan.job.seq_length,
        "layout": {key: value for key, value in chosen.items() if value != getattr(default, key)}
        | {"engine": plan.layout.engine, "implementation": plan.layout.implementation},
    }


def beside_prediction(plan: kit.Plan, times: list[float], memory: dict[str, Any]) -> dict[str, Any]:
    """Measured / predicted values. The predicted memory is without the CUDA context, which the allocator does not see,
    and without an export, which these runs do not do."""
    stage = plan.predicted.memory[0]
    phases = [size for phase, size in stage.phases_gib.items() if phase != "save"] or [stage.peak_gib]
    predicted_gib = max(phases) - stage.components_gib.get("overhead", 0.0)
    step_s = statistics.median(times[WARM_UP:])
    row = {
        "predicted_allocated_gib": predicted_gib,
        "predicted_step_s": plan.predicted.step_time_s,
        "measured_step_s": step_s,
        "steps_s": times,
        **memory,
        **speed(plan, step_s),
    }
    if plan.cluster.gpu.device == "cuda":
        row["step_ratio"] = step_s / plan.predicted.step_time_s
        row["memory_ratio"] = memory["measured_allocated_gib"] / predicted_gib
        row["predicted_mfu"] = plan.predicted.mfu
    return row


def speed(plan: kit.Plan, step_s: float) -> dict[str, Any]:
    """Tokens a second, and on a GPU the share of the data sheet's dense peak of the precision (causal model FLOPs)."""
    tokens_per_s = plan.job.global_batch_size * plan.job.seq_length / step_s
    if plan.cluster.gpu.device == "cpu":
        return {"tokens_per_s": tokens_per_s, "mfu": None}
    flops = model_flops_per_token(plan.model, plan.job.seq_length, plan.job.lora is not None) * tokens_per_s
    return {"tokens_per_s": tokens_per_s, "mfu": flops / peak_flops_per_s(plan.cluster.gpu, plan.job.precision)}
