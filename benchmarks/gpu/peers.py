"""Runs the 1B recipe without kit, and with kit's whole loop. A peer gets the largest micro batch that it is
predicted to have memory for.

Model, tokens a step, precision (bf16 autocast over fp32 weights) and clipping are the same; flags are in the row.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import kit
from benchmarks.gpu.cases import PLAIN, PLAIN_DEEPSPEED, RECIPES, Case, Skipped, peers_plan, planned
from benchmarks.gpu.measured import (
    LEARNING_RATE,
    STEPS,
    WARM_UP,
    beside_prediction,
    built_engine,
    described,
    engine_steps,
    measured_memory,
    now,
    random_batches,
    random_model,
    run_directory,
    speed,
    timed_steps,
)
from kit.rehearsal.processes import metrics
from kit.specs.run import DataSpec, LoggingSpec, ScheduleSpec
from kit.training.__main__ import process_group
from kit.training.data.indexed import PairFormat
from kit.training.data.indexed_writer import indexed_writer
from kit.training.loop import train


def measure(name: str, device: str, scratch: Path) -> dict[str, Any]:
    """A row. Raises Skipped, KitError."""
    return PEERS[name](device, scratch)


def _hugging_face(device: str, scratch: Path, best: bool) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    plan = peers_plan(device, scratch)
    flags: dict[str, Any] = {
        "per_device_train_batch_size": plan.layout.micro_batch_size,
        "gradient_accumulation_steps": plan.layout.gradient_accumulation_steps,
        "max_steps": STEPS,
        "bf16": device == "cuda",
        "save_strategy": "no",
        "report_to": [],
    }
    if best:
        flags |= {"optim": "adamw_torch_fused", "torch_compile": True, "dataloader_num_workers": 2}
        flags |= {"tf32": True, "dataloader_pin_memory": True} if device == "cuda" else {}
        flags |= _compiler(device, "torch_compile_backend")
        flags["use_liger_kernel"] = device == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    arguments = TrainingArguments(
        output_dir=str(scratch / "trainer"), use_cpu=device == "cpu", disable_tqdm=True, **flags
    )

    class Stopwatch(TrainerCallback):
        began, times = 0.0, []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = now(device)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(now(device) - self.began)

    rows = [
        {"input_ids": row, "labels": row}
        for step in range(STEPS)
        for batch in random_batches(plan, step)
        for row in batch.input_ids
    ]
    stopwatch = Stopwatch()
    model = random_model(plan, torch.float32)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[stopwatch])
    trainer.train()
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
        raise RuntimeError("weights are not finite after training")
    return _row(plan, stopwatch.times, flags)


def _plain(device: str, scratch: Path, compiled: bool) -> dict[str, Any]:
    """A plain torch loop of thirty lines."""
    plan = peers_plan(device, scratch)
    model = random_model(plan, torch.float32).to(device).train()
    backend: dict[str, Any] = _compiler(device, "backend")
    call = torch.compile(model, **backend) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device == "cuda")
    accumulation = plan.layout.gradient_accumulation_steps

    def one(step: int) -> None:
        for batch in random_batches(plan, step):
            tokens, labels = batch.input_ids.to(device), batch.labels.to(device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = call(input_ids=tokens, use_cache=False).logits
            (F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.job.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    flags = {**sizes_of(plan), "fused": device == "cuda", "compile": compiled, **(backend if compiled else {})}
    return _row(plan, timed_steps(one, device), flags)


def _bare_deepspeed(device: str, scratch: Path) -> dict[str, Any]:
    """DeepSpeed's own three calls with kit's ds_config.json."""
    plan = peers_plan(device, scratch, PLAIN_DEEPSPEED)
    rundir = run_directory(plan, scratch)
    with process_group(rundir):
        from kit.engines.deepspeed.build import build_deepspeed  # imports deepspeed once the device is known

        engine, _ = build_deepspeed(rundir)

        def one(step: int) -> None:
            batches = random_batches(plan, step)
            for index, batch in enumerate(batches):
                engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
                logits = engine(input_ids=batch.input_ids.to(device), use_cache=False).logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), batch.labels.to(device).flatten())
                engine.backward(loss / len(batches), scale_wrt_gas=False)
            engine.step()

        with torch.enable_grad():
            row = _row(plan, timed_steps(one, device), {"ds_config.json": "kit's", **sizes_of(plan)})
        engine.destroy()
        return row


def _transformer_engine(device: str, scratch: Path) -> dict[str, Any]:
    """Megatron-core's layers with Transformer Engine, in kit's engine without kit's loop."""
    if device == "cpu":
        raise Skipped("Transformer Engine has kernels for GPUs alone")
    if importlib.util.find_spec("transformer_engine") is None:
        raise Skipped("transformer-engine is not installed")
    flags = {"implementation": "transformer_engine"}
    plan = planned(dataclasses.replace(RECIPES[2], pins=RECIPES[2].pins | flags), device, scratch)
    with built_engine(run_directory(plan, scratch)) as engine:
        times, _ = engine_steps(engine, plan)
        return described(plan) | beside_prediction(plan, times, measured_memory(engine, device)) | {"flags": flags}


def _kit(engine_name: str, like: Case | None = None) -> Callable[[str, Path], dict[str, Any]]:
    """``kit train`` with everything: data from disk, metrics, watchdog, checks of the gradient norm.

    ``like``: without the fast path, with the micro batch of the bare loop to compare with.
    """

    def run(device: str, scratch: Path) -> dict[str, Any]:
        case = next(case for case in RECIPES if case.pins["engine"] == engine_name)
        plan = planned(case, device, scratch) if like is None else peers_plan(device, scratch, like)
        data = _tokens_on_disk(plan, scratch / "tokens")
        schedule, logging = ScheduleSpec(kind="constant"), LoggingSpec(every_steps=1)
        rundir = run_directory(plan, scratch, data=data, schedule=schedule, logging=logging)
        with built_engine(rundir) as engine:
            train(engine, rundir)
            memory = measured_memory(engine, device)
        rows = metrics(rundir.path)
        # A step's loop_s is logged with the next step.
        turns = [row["step_time_s"] + after["loop_s"] for row, after in itertools.pairwise(rows)]
        loop_s = statistics.median(row["loop_s"] for row in rows[WARM_UP:])
        flags = {"engine": engine_name} | ({} if like is None else {"fast path": False, **sizes_of(plan)})
        return described(plan) | _timed(plan, turns) | memory | {"loop_s": loop_s, "flags": flags}

    return run


PEERS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    "kit train, torch": _kit("torch"),
    "plain PyTorch": lambda device, scratch: _plain(device, scratch, compiled=False),
    "plain PyTorch, torch.compile": lambda device, scratch: _plain(device, scratch, compiled=True),
    "Hugging Face Trainer, defaults": lambda device, scratch: _hugging_face(device, scratch, best=False),
    "Hugging Face Trainer, best flags": lambda device, scratch: _hugging_face(device, scratch, best=True),
    "kit train, torch, eager mode": _kit("torch", PLAIN),
    "kit train, deepspeed": _kit("deepspeed"),
    "bare DeepSpeed": _bare_deepspeed,
    "kit train, deepspeed, eager mode": _kit("deepspeed", PLAIN_DEEPSPEED),
    "kit train, megatron": _kit("megatron"),
    "Megatron-core, Transformer Engine": _transformer_engine,
}
"""In order of importance."""
BARE = {
    "kit train, torch": "1B, torch",
    "kit train, deepspeed": "1B, deepspeed",
    "kit train, megatron": "1B, megatron",
    "kit train, torch, eager mode": "plain PyTorch",
    "kit train, deepspeed, eager mode": "bare DeepSpeed",
}
"""The same work with the same sizes without kit's loop: the engine alone, and bare loops of other programs."""


def sizes_of(plan: kit.Plan) -> dict[str, int]:
    """Micro batch size and gradient accumulation steps of a plan."""
    layout = plan.layout
    accumulation = layout.gradient_accumulation_steps
    return {"micro_batch_size": layout.micro_batch_size, "gradient_accumulation_steps": accumulation}


def _compiler(device: str, key: str) -> dict[str, str]:
    """Environment of torch.compile. On a CPU it generates no C++, because the dry run does not measure speed."""
    return {key: "aot_eager"} if device == "cpu" else {}


def _tokens_on_disk(plan: kit.Plan, prefix: Path) -> DataSpec:
    with indexed_writer(prefix, PairFormat(tokenizer="random", vocab_size=plan.model.vocab_size)) as writer:
        for step in range(STEPS + 1):
            for batch in random_batches(plan, step):
                for row in batch.input_ids:
                    writer.add_document(row.tolist())
    return DataSpec(train=str(prefix))


def _row(plan: kit.Plan, times: list[float], flags: dict[str, Any]) -> dict[str, Any]:
    """The row of a peer, without predictions, which are for kit's implementation only."""
    memory = measured_memory(None, plan.cluster.gpu.device)
    return (
        {"model": plan.model.name, "seq_length": plan.job.seq_length} | _timed(plan, times) | memory | {"flags": flags}
    )


def _timed(plan: kit.Plan, times: list[float]) -> dict[str, Any]:
    step_s = statistics.median(times[WARM_UP:])
    return {"measured_step_s": step_s, "steps_s": times, **speed(plan, step_s)}
