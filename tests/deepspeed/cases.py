"""What the workers of these tests run; what they are compared with is in ``plain``.

Every case starts from one Hugging Face directory and sees the same 8 samples a step, whatever the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from kit.emit.deepspeed import ds_config
from kit.engines.full_tensors import full_tensors
from kit.engines.huggingface.models import random_model
from kit.engines.protocol import IGNORE_INDEX, MicroBatch, StateKind
from kit.planner.plan import Plan
from kit.specs.job import LoraSpec, Objective
from kit.specs.model import ModelSpec
from kit.training.checkpoint.manifest import Checkpoint
from kit.training.counters import Counters
from tests.deepspeed import samples
from tests.deepspeed.plain import GRAD_CLIP, OPTIMIZER, Curve, learning_rate
from tests.megatron.cases import sets_are_the_step
from tests.support import tiny
from tests.support.checkpoints import export, load
from tests.support.workers import pool
from tests.training import cases as training
from tests.training import runs

WORLD_SIZE = 2
MOMENTS = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)


def plan(
    stage: int,
    *,
    precision: str = "fp32",
    tied: bool = False,
    spec: ModelSpec | None = None,
    eps: float = OPTIMIZER.eps,
    objective: Objective = "pretrain",
    seq_length: int = tiny.SEQ_LENGTH,
    lora: LoraSpec | None = None,
    **layout: Any,
) -> Plan:
    """A DeepSpeed plan on 2 CPU processes; 2 micro batches of 2 unless ``layout`` says otherwise."""
    chosen = {"dp": WORLD_SIZE, "micro_batch_size": 2, "gradient_accumulation_steps": 2} | layout
    optimizer = dataclasses.replace(OPTIMIZER, eps=eps)
    job = {"precision": precision, "optimizer": optimizer, "grad_clip": GRAD_CLIP, "objective": objective}
    model = spec or tiny.model(tied_embeddings=tied)
    return tiny.plan(
        model, job=job | {"seq_length": seq_length, "lora": lora}, engine="deepspeed", zero_stage=stage, **chosen
    )


def on(device: str, chosen: Plan) -> Plan:
    """The plan for GPUs, or for a CPU."""
    gpu = dataclasses.replace(chosen.cluster.gpu, device=device)
    return dataclasses.replace(chosen, cluster=dataclasses.replace(chosen.cluster, gpu=gpu))


def hf_directory(path: Path, tied: bool = False, spec: ModelSpec | None = None) -> Path:
    """The model that every case starts from."""
    random_model(spec or tiny.model(tied_embeddings=tied), seed=7).save_pretrained(path / "hf")
    return path / "hf"


def run(case: Callable[..., Any], chosen: Plan, *arguments: Any) -> Any:
    """What ``case`` returns on the main rank. Megatron's processes have its table of patches for the CPU, DeepSpeed's
    have not."""
    engine = "megatron" if chosen.layout.implementation == "local" else "deepspeed"
    return pool(engine, chosen.layout.world_size).run(case, chosen, *arguments)[0]


# ---------------------------------------------------------------------- in the workers


def directory_of(
    chosen: Plan, start: Path | None, directory: Path, settings: dict[str, Any] | None = None, **run: Any
) -> tiny.TinyRunDirectory:
    """A run directory that begins with the weights at ``start`` (random ones for None); ``run`` overrides the RunSpec's
    defaults."""
    paths = {"model_path": None if start is None else str(start), "nvme_path": str(directory)}
    rundir = runs.with_settings(tiny.run_directory(directory, chosen, **(paths | run)))
    return rundir if settings is None else dataclasses.replace(rundir, settings=settings)


def build(*given: Any, **run: Any) -> Any:
    """The engine of ``directory_of`` the same arguments."""
    return training.build(directory_of(*given, **run))


def advance(
    engine: Any, chosen: Plan, first: int, last: int, fault: str | None = None
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Steps first … last-1: losses, gradient norms, and the first step's gradients (on the main rank)."""
    losses, norms, gradients = [], [], {}
    for step in range(first, last):
        batches = micro_batches(engine, chosen, step)
        loss = engine.forward_backward([dataclasses.replace(each, data_set=n % 2) for n, each in enumerate(batches)])
        assert fault or sets_are_the_step(engine, loss, chosen.layout.tp)
        losses.append(loss.mean)
        if step == first:
            gradients = exported(engine, StateKind.GRADIENT)
        norms.append(engine.apply(learning_rate(step)).gradient)
    return losses, norms, gradients


def micro_batches(engine: Any, chosen: Plan, step: int) -> list[Any]:
    """Samples differ in how many labels count, and so do ranks and micro batches. Of longer ones than the job's, the
    end, in which some count."""
    found = samples.micro_batches(
        chosen.job.objective,
        step,
        mbs=chosen.layout.micro_batch_size,
        accumulation=chosen.layout.gradient_accumulation_steps,
        dp_rank=engine.dp_rank,
        dp_size=engine.dp_size,
    )
    if (length := chosen.job.seq_length) < tiny.SEQ_LENGTH:
        found = [MicroBatch(each.input_ids[:, -length:], each.labels[:, -length:]) for each in found]
    return found


exported = full_tensors
"""Of an engine and a kind: all tensors on the main rank; empty elsewhere."""


def train(
    chosen: Plan,
    start: Path,
    directory: Path,
    steps: int,
    fault: str | None = None,
    zero: Mapping[str, Any] | None = None,
) -> Curve:
    """A fresh engine for some steps, or one with a fault of tests.system.parity in it, or with other sizes
    in ``zero``, the section zero_optimization."""
    from tests.system.parity.faults import planted

    with planted(fault), closing(build(chosen, start, directory, resized(chosen, zero))) as engine:
        evaluated = engine.evaluate(micro_batches(engine, chosen, 0))
        curve = Curve(*advance(engine, chosen, 0, steps, fault), exported(engine, StateKind.MASTER))
    # On every layout: of the same batch and weights, before the first step.
    assert fault or (abs(evaluated.mean / curve.losses[0] - 1) < 1e-5 and evaluated.tokens == counted(chosen, 0))
    return curve


def counted(chosen: Plan, step: int) -> int:
    """Labels that count in a step of all ranks."""
    layout, objective = chosen.layout, chosen.job.objective
    each = {"mbs": layout.micro_batch_size, "accumulation": layout.gradient_accumulation_steps * layout.dp}
    rows = samples.micro_batches(objective, step, **each, dp_rank=0, dp_size=1)
    return sum(int((each.labels[:, -chosen.job.seq_length :] != IGNORE_INDEX).sum()) for each in rows)


def resized(chosen: Plan, zero: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is emitted, with other sizes in the section zero_optimization."""
    settings = ds_config(chosen)
    if zero:
        settings["zero_optimization"] |= zero
    return settings


def leave(
    chosen: Plan,
    start: Path,
    directory: Path,
    steps: int,
    zero: Mapping[str, Any] | None = None,
    more: int = 0,
) -> Curve:
    """Some steps, a checkpoint after them, and the curve of ``more`` steps."""
    with closing(build(chosen, start, directory, resized(chosen, zero))) as engine:
        advance(engine, chosen, 0, steps)
        made = engine.optimizer_steps
        counters = Counters(step=steps, samples_seen=0, tokens_seen=0, optimizer_steps=made, samples_skipped=0)
        export(engine, directory / "step", chosen, counters)
        return Curve(*advance(engine, chosen, steps, steps + more), exported(engine, StateKind.MASTER))


def go_on(
    chosen: Plan,
    checkpoint: Path,
    directory: Path,
    steps: int,
    fault: str | None = None,
    zero: Mapping[str, Any] | None = None,
) -> tuple[Curve, list[str]]:
    """Trains as many steps again from a checkpoint. Returns what the engine did not load bit for bit, too."""
    from tests.system.parity.faults import planted

    with planted(fault), closing(build(chosen, None, directory, resized(chosen, zero))) as engine:
        counters = load(engine, checkpoint, chosen)
        different = ["optimizer_steps"] * (engine.optimizer_steps != counters.optimizer_steps) + [
            f"{kind} {name}"
            for kind in (StateKind.MASTER, *MOMENTS)
            for name, tensor in exported(engine, kind).items()
            if not torch.equal(tensor, Checkpoint(checkpoint).source(kind).read(name))
        ]
        curve = advance(engine, chosen, counters.step, counters.step + steps, fault)
        return Curve(*curve, exported(engine, StateKind.MASTER)), different


def resumed(chosen: Plan, start: Path, directory: Path, zero: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``tests.training.cases.train`` of the plan."""
    return training.train(directory_of(chosen, start, directory, resized(chosen, zero)))


def disturb(chosen: Plan, start: Path, directory: Path, zero: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Two steps; and two steps with moments exported before them, and with discarded gradients and evaluations before,
    between and within them."""
    with closing(build(chosen, start, directory, resized(chosen, zero))) as engine:
        plain = advance(engine, chosen, 0, 2)[:2]
    with closing(build(chosen, start, directory, resized(chosen, zero))) as engine:
        if chosen.layout.offload_optimizer != "nvme":
            exported(engine, StateKind.EXP_AVG)  # makes moments, which no step has
            assert engine.optimizer_steps == 0
        losses, norms = [], []
        for step in range(2):
            engine.forward_backward(micro_batches(engine, chosen, step + 5))
            engine.discard()
            engine.evaluate(micro_batches(engine, chosen, step + 7))
            losses.append(engine.forward_backward(micro_batches(engine, chosen, step)).mean)
            engine.evaluate(micro_batches(engine, chosen, step + 9))
            norms.append(engine.apply(learning_rate(step)).gradient)
    return plain, (losses, norms)


def initial(chosen: Plan, start: Path | None, directory: Path) -> dict[str, torch.Tensor]:
    """What an engine exports before its first step, on the main rank."""
    return inside(chosen, start, directory, lambda engine, _: exported(engine, StateKind.MASTER))


def inside(
    chosen: Plan,
    start: Path | None,
    directory: Path,
    look: Callable[[Any, Plan], Any],
    run: Mapping[str, Any] | None = None,
) -> Any:
    """``look(engine, plan)`` of a fresh engine. ``run``: more arguments of ``build``."""
    with closing(build(chosen, start, directory, **(run or {}))) as engine:
        return look(engine, chosen)
