"""What the workers of these tests run, and plain torch for comparison.

Every case starts from one Hugging Face directory and sees the same 8 samples a step, whatever the layout. Adam's
epsilon is large: at 1e-8 the first steps are sign descent, and a doubled gradient moves the loss by 1e-6.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kit.emit.deepspeed import ds_config
from kit.emit.megatron import applies, megatron_settings
from kit.engines import experts
from kit.engines.base import IGNORE_INDEX, StateKind
from kit.engines.hf import build_model
from kit.planner.plan import Plan
from kit.specs.job import OptimizerSpec
from kit.specs.model import ModelSpec
from kit.training.checkpoint.hub import Counters, HubCheckpoint, export_hub, import_hub
from tests.training import batches, tiny

WORLD_SIZE = 2
GLOBAL_BATCH_SIZE = 8
OPTIMIZER = OptimizerSpec(eps=1e-4)
GRAD_CLIP = 0.7
"""Below the first steps' gradient norms: clipping is part of what is compared."""
Settings = Callable[[Plan], dict[str, Any]]
"""From a plan to the ds_config that the engine gets."""
MOMENTS = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)


@dataclass(frozen=True)
class Curve:
    """What training did; gradients of the first step and masters after the last, by Hugging Face name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]


def plan(
    stage: int,
    *,
    precision: str = "fp32",
    tied: bool = False,
    spec: ModelSpec | None = None,
    eps: float = OPTIMIZER.eps,
    **layout: Any,
) -> Plan:
    """A DeepSpeed plan on 2 CPU processes; 2 micro batches of 2 unless ``layout`` says otherwise."""
    chosen = {"dp": WORLD_SIZE, "micro_batch_size": 2, "gradient_accumulation_steps": 2} | layout
    job = {"precision": precision, "optimizer": dataclasses.replace(OPTIMIZER, eps=eps), "grad_clip": GRAD_CLIP}
    model = spec or tiny.model(tied_embeddings=tied)
    return tiny.plan(model, job=job, engine="deepspeed", zero_stage=stage, **chosen)


def hf_directory(path: Path, tied: bool = False, spec: ModelSpec | None = None) -> Path:
    """The model that every case starts from."""
    rundir = tiny.run_directory(path / "seed", tiny.plan(spec or tiny.model(tied_embeddings=tied)))
    build_model(rundir, torch.float32, "cpu").save_pretrained(path / "hf")
    return path / "hf"


def learning_rate(step: int) -> float:
    """Changes at every step, so that an engine that keeps its own shows."""
    return 1e-2 / (1 + step)


# ---------------------------------------------------------------------- in the workers


def build(chosen: Plan, start: Path | None, directory: Path, settings: dict[str, Any] | None = None, **run: Any) -> Any:
    """The engine, from the weights at ``start`` (random ones for None); ``run`` overrides the RunSpec's defaults."""
    from kit.engines.deepspeed.engine import DeepSpeedEngine

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
    """Samples have from 1 to 32 labels that count, so ranks and micro batches differ in them."""
    return batches.micro_batches(
        step,
        mbs=chosen.layout.micro_batch_size,
        accumulation=chosen.layout.gradient_accumulation_steps,
        dp_rank=engine.dp_rank,
        dp_size=engine.dp_size,
    )


def exported(engine: Any, kind: StateKind) -> dict[str, torch.Tensor]:
    """All tensors of a kind on the main rank; empty elsewhere."""
    return {name: tensor for name, tensor in engine.export_state(kind) if tensor is not None}


def train(chosen: Plan, start: Path, directory: Path, steps: int, fault: str | None = None) -> Curve:
    """A fresh engine for some steps, or one with a fault of benchmarks.parity in it."""
    from benchmarks.parity.deepspeed_faults import planted

    with planted(fault):
        engine = build(chosen, start, directory)
        curve = Curve(*advance(engine, chosen, 0, steps), exported(engine, StateKind.MASTER))
        engine.close()
    return curve


def leave(chosen: Plan, start: Path, directory: Path, steps: int, fault: str | None = None) -> None:
    """Some steps, and a hub checkpoint after them."""
    engine = build(chosen, start, directory)
    advance(engine, chosen, 0, steps)
    counters = Counters(step=steps, samples_seen=0, tokens_seen=0, optimizer_steps=engine.optimizer_steps)
    export_hub(engine, directory / "hub", counters, model=chosen.model)
    engine.close()


def go_on(chosen: Plan, hub: Path, directory: Path, steps: int, fault: str | None = None) -> tuple[Curve, list[str]]:
    """As many steps again from a hub checkpoint; and what is not bit for bit in the engine as it was on disk."""
    from benchmarks.parity.deepspeed_faults import planted

    with planted(fault):
        engine = build(chosen, None, directory)
        counters = import_hub(engine, hub)
    different = [
        f"{kind} {name}"
        for kind in (StateKind.MASTER, *MOMENTS)
        for name, tensor in exported(engine, kind).items()
        if not torch.equal(tensor, HubCheckpoint(hub).source(kind).read(name))
    ]
    if engine.optimizer_steps != counters.optimizer_steps:
        different.append("optimizer_steps")
    curve = Curve(*advance(engine, chosen, counters.step, counters.step + steps), exported(engine, StateKind.MASTER))
    engine.close()
    return curve, different


def through_the_hub(
    before: Plan, after: Plan, start: Path, directory: Path, settings: Settings = ds_config
) -> tuple[Curve, Curve]:
    """6 steps without a break, and 3 steps, export, import into a fresh engine of another plan, 3 steps."""
    engine = build(before, start, directory, settings(before))
    whole = Curve(*advance(engine, before, 0, 6), exported(engine, StateKind.MASTER))
    engine.close()

    engine = build(before, start, directory, settings(before))
    advance(engine, before, 0, 3)
    counters = Counters(step=3, samples_seen=24, tokens_seen=0, optimizer_steps=engine.optimizer_steps)
    export_hub(engine, directory / "hub", counters, model=before.model)
    engine.close()

    engine = build(after, None, directory, settings(after))
    import_hub(engine, directory / "hub")
    resumed = Curve(*advance(engine, after, 3, 6), exported(engine, StateKind.MASTER))
    engine.close()
    return whole, resumed


def natively(
    chosen: Plan, start: Path, directory: Path, settings: Settings = ds_config
) -> tuple[list[float], list[float], list[str]]:
    """Losses after a native save, those of a fresh engine that loaded it, and tensors that differ at the end."""
    native = directory / "native"
    native.mkdir(exist_ok=True)
    engine = build(chosen, start, directory, settings(chosen))
    advance(engine, chosen, 0, 3)
    engine.save(native)
    losses, _, _ = advance(engine, chosen, 3, 6)
    states = {kind: exported(engine, kind) for kind in (StateKind.MASTER, *MOMENTS)}
    engine.close()

    engine = build(chosen, None, directory, settings(chosen))
    engine.load(native)
    again, _, _ = advance(engine, chosen, 3, 6)
    different = [
        f"{kind} {name}"
        for kind, tensors in states.items()
        for name, tensor in exported(engine, kind).items()
        if not torch.equal(tensor, tensors[name])
    ]
    assert engine.optimizer_steps == 6
    engine.close()
    return losses, again, different


def disturb(chosen: Plan, start: Path, directory: Path, settings: Settings = ds_config) -> tuple[Any, Any]:
    """Two steps; and two steps with discarded gradients and evaluations before, between and within them."""
    engine = build(chosen, start, directory, settings(chosen))
    plain = advance(engine, chosen, 0, 2)[:2]
    engine.close()

    engine = build(chosen, start, directory, settings(chosen))
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


# ---------------------------------------------------------------------- plain torch


def reference(start: Path, steps: int, eps: float = OPTIMIZER.eps, spec: ModelSpec | None = None) -> Curve:
    """One process, the whole batch at once, nothing of kit's engines; ``spec``: of a model with experts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(start, local_files_only=True, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        samples = [batches.sample(step * GLOBAL_BATCH_SIZE + k) for k in range(GLOBAL_BATCH_SIZE)]
        inputs, labels = (torch.stack(column) for column in zip(*samples, strict=True))
        logits = model(input_ids=inputs, use_cache=False).logits
        # The mean over the labels that count is torch's own reduction.
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(clip(list(model.parameters())))
        for group in adam.param_groups:
            group["lr"] = learning_rate(step)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    masters = {name: p.detach() for name, p in model.named_parameters()}
    return Curve(losses, norms, _on_disk(spec, gradients), _on_disk(spec, masters))


def _on_disk(spec: ModelSpec | None, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if spec is None:
        return tensors
    parts = (pair for name, tensor in tensors.items() for pair in experts.split(spec, name, tensor))
    return {name: tensor for name, tensor in parts if tensor is not None}


def clip(parameters: list[torch.nn.Parameter]) -> float:
    """Clip as torch does, by a norm in fp64: on a CPU torch's fp32 norm is off by 1e-5 at a few million elements."""
    norm = float(torch.stack([p.grad.double().square().sum() for p in parameters]).sum().sqrt())
    coefficient = min(1.0, GRAD_CLIP / (norm + 1e-6))
    for parameter in parameters:
        parameter.grad.mul_(coefficient)
    return norm


def gradient_error(found: Curve, expected: Curve) -> float:
    """Largest ‖g − g_ref‖ / ‖g_ref‖ over the parameters."""
    assert found.gradients.keys() == expected.gradients.keys()
    return max(float((found.gradients[n] - g).norm() / g.norm()) for n, g in expected.gradients.items())


def curve_error(found: list[float], expected: list[float]) -> float:
    """Largest relative difference over the steps."""
    pairs = itertools.zip_longest(found, expected, fillvalue=float("inf"))
    return max(abs(x - x_ref) / abs(x_ref) for x, x_ref in pairs)
