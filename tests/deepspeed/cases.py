"""What the workers of these tests run; what they are compared with is in ``plain``.

Every case starts from one Hugging Face directory and sees the same 8 samples a step, whatever the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kit.emit.deepspeed import ds_config
from kit.emit.megatron import applies, megatron_settings
from kit.engines.base import MicroBatch, StateKind
from kit.engines.full_tensors import full_tensors
from kit.engines.huggingface.models import build_model
from kit.planner.plan import Plan
from kit.specs.job import Objective
from kit.specs.model import ModelSpec
from kit.training.checkpoint.counters import Counters
from kit.training.checkpoint.exchange import ExchangeCheckpoint
from kit.training.checkpoint.transfer import export_exchange, import_exchange
from tests.deepspeed import samples
from tests.deepspeed.plain import GRAD_CLIP, OPTIMIZER, Curve, learning_rate
from tests.support import tiny

WORLD_SIZE = 2
Settings = Callable[[Plan], dict[str, Any]]
"""From a plan to the ds_config that the engine gets."""
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
    **layout: Any,
) -> Plan:
    """A DeepSpeed plan on 2 CPU processes; 2 micro batches of 2 unless ``layout`` says otherwise."""
    chosen = {"dp": WORLD_SIZE, "micro_batch_size": 2, "gradient_accumulation_steps": 2} | layout
    optimizer = dataclasses.replace(OPTIMIZER, eps=eps)
    job = {"precision": precision, "optimizer": optimizer, "grad_clip": GRAD_CLIP, "objective": objective}
    job["seq_length"] = seq_length
    model = spec or tiny.model(tied_embeddings=tied)
    return tiny.plan(model, job=job, engine="deepspeed", zero_stage=stage, **chosen)


def hf_directory(path: Path, tied: bool = False, spec: ModelSpec | None = None) -> Path:
    """The model that every case starts from."""
    rundir = tiny.run_directory(path / "seed", tiny.plan(spec or tiny.model(tied_embeddings=tied)))
    build_model(rundir, torch.float32, "cpu").save_pretrained(path / "hf")
    return path / "hf"


# ---------------------------------------------------------------------- in the workers


def build(chosen: Plan, start: Path | None, directory: Path, settings: dict[str, Any] | None = None, **run: Any) -> Any:
    """The engine, from the weights at ``start`` (random ones for None); ``run`` overrides the RunSpec's defaults.

    DeepSpeed refuses fp16 on CPU processes because they are slow at it: its accelerator is told that they take it."""
    from deepspeed.accelerator import get_accelerator

    from kit.engines.deepspeed.engine import DeepSpeedEngine

    if chosen.job.precision == "fp16":
        type(get_accelerator()).is_fp16_supported = lambda self: True
    paths = {"model_path": None if start is None else str(start), "nvme_path": str(directory)}
    rundir = tiny.run_directory(directory, chosen, **(paths | run))
    rundir = dataclasses.replace(
        rundir,
        settings=ds_config(chosen) if settings is None else settings,
        megatron=megatron_settings(chosen) if applies(chosen) else {},
    )
    return DeepSpeedEngine(rundir)  # type: ignore[arg-type]


def advance(
    engine: Any, chosen: Plan, first: int, last: int
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Steps first … last-1: losses, gradient norms, and the first step's gradients (on the main rank)."""
    losses, norms, gradients = [], [], {}
    for step in range(first, last):
        losses.append(engine.forward_backward(micro_batches(engine, chosen, step)).mean)
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


def exported(engine: Any, kind: StateKind) -> dict[str, torch.Tensor]:
    """All tensors of a kind on the main rank; empty elsewhere."""
    return full_tensors(engine, kind)


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

    with planted(fault):
        engine = build(chosen, start, directory, resized(chosen, zero))
        evaluated = engine.evaluate(micro_batches(engine, chosen, 0))
        curve = Curve(
            *advance(engine, chosen, 0, steps), exported(engine, StateKind.MASTER), engine.held_bytes().get("nvme", 0)
        )
        engine.close()
    # On every layout: of the same batch and weights, before the first step.
    assert fault or abs(evaluated.mean / curve.losses[0] - 1) < 1e-5, (evaluated, curve.losses[0])
    return curve


def resized(chosen: Plan, zero: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is emitted, with other sizes in the section zero_optimization."""
    settings = ds_config(chosen)
    if zero:
        settings["zero_optimization"] |= zero
    return settings


def leave(chosen: Plan, start: Path, directory: Path, steps: int, zero: Mapping[str, Any] | None = None) -> None:
    """Some steps, and an exchange checkpoint after them."""
    engine = build(chosen, start, directory, resized(chosen, zero))
    advance(engine, chosen, 0, steps)
    counters = Counters(
        step=steps, samples_seen=0, tokens_seen=0, optimizer_steps=engine.optimizer_steps, samples_skipped=0
    )
    export_exchange(engine, directory / "exchange", counters, model=chosen.model)
    engine.close()


def go_on(
    chosen: Plan,
    exchange: Path,
    directory: Path,
    steps: int,
    fault: str | None = None,
    zero: Mapping[str, Any] | None = None,
) -> tuple[Curve, list[str]]:
    """Trains as many steps again from an exchange checkpoint. Returns what the engine did not load bit for bit, too."""
    from tests.system.parity.faults import planted

    with planted(fault):
        engine = build(chosen, None, directory, resized(chosen, zero))
        counters = import_exchange(engine, exchange)
    different = [
        f"{kind} {name}"
        for kind in (StateKind.MASTER, *MOMENTS)
        for name, tensor in exported(engine, kind).items()
        if not torch.equal(tensor, ExchangeCheckpoint(exchange).source(kind).read(name))
    ]
    if engine.optimizer_steps != counters.optimizer_steps:
        different.append("optimizer_steps")
    curve = Curve(*advance(engine, chosen, counters.step, counters.step + steps), exported(engine, StateKind.MASTER))
    engine.close()
    return curve, different


def through_the_exchange_checkpoint(
    before: Plan, after: Plan, start: Path, directory: Path, settings: Settings = ds_config
) -> tuple[Curve, Curve]:
    """Two steps, export, and two steps more; and the same two after an import into a fresh engine of another plan."""
    engine = build(before, start, directory, settings(before))
    advance(engine, before, 0, 2)
    counters = Counters(
        step=2, samples_seen=16, tokens_seen=0, optimizer_steps=engine.optimizer_steps, samples_skipped=0
    )
    export_exchange(engine, directory / "exchange", counters, model=before.model)
    whole = Curve(*advance(engine, before, 2, 4), exported(engine, StateKind.MASTER))
    engine.close()

    engine = build(after, None, directory, settings(after))
    import_exchange(engine, directory / "exchange")
    resumed = Curve(*advance(engine, after, 2, 4), exported(engine, StateKind.MASTER))
    engine.close()
    return whole, resumed


def natively(
    chosen: Plan, start: Path, directory: Path, settings: Settings = ds_config
) -> tuple[list[float], list[float], list[str]]:
    """Losses after a native save, those of a fresh engine that loaded it, and tensors that differ at the end."""
    native = directory / "native"
    native.mkdir(exist_ok=True)
    engine = build(chosen, start, directory, settings(chosen))
    advance(engine, chosen, 0, 2)
    engine.save(native)
    losses, _, _ = advance(engine, chosen, 2, 4)
    states = {kind: exported(engine, kind) for kind in (StateKind.MASTER, *MOMENTS)}
    engine.close()

    engine = build(chosen, None, directory, settings(chosen))
    engine.load(native)
    again, _, _ = advance(engine, chosen, 2, 4)
    different = [
        f"{kind} {name}"
        for kind, tensors in states.items()
        for name, tensor in exported(engine, kind).items()
        if not torch.equal(tensor, tensors[name])
    ]
    assert engine.optimizer_steps == 4
    engine.close()
    return losses, again, different


def disturb(chosen: Plan, start: Path, directory: Path, settings: Settings = ds_config) -> tuple[Any, Any]:
    """Two steps; and two steps with moments exported before them, and with discarded gradients and evaluations before,
    between and within them."""
    engine = build(chosen, start, directory, settings(chosen))
    plain = advance(engine, chosen, 0, 2)[:2]
    engine.close()

    engine = build(chosen, start, directory, settings(chosen))
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
    engine.close()
    return plain, (losses, norms)


def initial(chosen: Plan, start: Path | None, directory: Path) -> dict[str, torch.Tensor]:
    """What an engine exports before its first step, on the main rank."""
    engine = build(chosen, start, directory)
    found = exported(engine, StateKind.MASTER)
    engine.close()
    return found
