"""What worker processes run for the tests of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kit.engines.base import StateKind
from kit.engines.full_tensors import full_tensors
from kit.engines.torch.engine import TorchEngine
from kit.training.checkpoint.counters import Counters
from kit.training.checkpoint.transfer import export_exchange, import_exchange
from tests.support import tiny
from tests.training.batches import micro_batches

COUNTERS = Counters(step=3, samples_seen=24, tokens_seen=768, optimizer_steps=3, samples_skipped=0)


def state(engine: TorchEngine, kind: StateKind) -> dict[str, torch.Tensor]:
    """One kind of state on the main rank, {} elsewhere."""
    return full_tensors(engine, kind)


def batches(engine: TorchEngine, rundir: tiny.TinyRunDirectory, step: int, masked: bool = True):
    """This rank's micro batches of a step."""
    layout = rundir.plan.layout
    return micro_batches(
        step,
        mbs=layout.micro_batch_size,
        accumulation=layout.gradient_accumulation_steps,
        dp_rank=engine.dp_rank,
        dp_size=engine.dp_size,
        masked=masked,
    )


def steps(engine: TorchEngine, rundir: tiny.TinyRunDirectory, first: int, count: int, rate: float = 1e-2):
    """(mean loss, gradient norm) of each step."""
    curve = []
    for step in range(first, first + count):
        loss = engine.forward_backward(batches(engine, rundir, step))
        curve.append((loss.mean, engine.apply(rate).gradient))
    return curve


def train_and_export(rundir: tiny.TinyRunDirectory, exchange: Path | None = None, count: int = 3) -> dict[str, Any]:
    """Gradients of the first step, then ``count`` steps, an exchange checkpoint, and two steps more."""
    engine = TorchEngine(rundir)
    first = engine.forward_backward(batches(engine, rundir, 0))
    gradients = state(engine, StateKind.GRADIENT)
    engine.discard()
    curve = steps(engine, rundir, 0, count)
    if exchange is not None:
        export_exchange(engine, exchange, COUNTERS, model=rundir.plan.model)
    evaluated = engine.evaluate(batches(engine, rundir, 50))
    after = steps(engine, rundir, count, 2)
    result = {"first": first, "gradients": gradients, "curve": curve, "after": after, "evaluated": evaluated}
    result |= {"steps": engine.optimizer_steps, "master": state(engine, StateKind.MASTER)}
    engine.close()
    return result


def train_with(rundir: tiny.TinyRunDirectory, fault: str) -> dict[str, Any]:
    """``train_and_export`` with a fault of tests.system.parity in the engine."""
    from tests.system.parity.faults import planted

    with planted(fault):
        return train_and_export(rundir)


def saved_on_host(rundir: tiny.TinyRunDirectory) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Bytes of each tensor that goes to the host, and the gradients."""
    from unittest import mock

    from kit.engines.kernels.offloaded_inputs import OffloadedInputs

    sizes: list[int] = []
    original = OffloadedInputs.copy

    def copy(lane: OffloadedInputs, target: torch.Tensor, source: torch.Tensor) -> Any:
        sizes.append(source.nbytes)
        return original(lane, target, source)

    engine = TorchEngine(rundir)
    with mock.patch.object(OffloadedInputs, "copy", copy):
        engine.forward_backward(batches(engine, rundir, 0))
    return sizes, state(engine, StateKind.GRADIENT)


def import_and_train(rundir: tiny.TinyRunDirectory, exchange: Path, count: int = 3) -> dict[str, Any]:
    """Two steps from an exchange checkpoint that ``count`` steps made."""
    engine = TorchEngine(rundir)
    counters = import_exchange(engine, exchange)
    evaluated = engine.evaluate(batches(engine, rundir, 50))
    after = steps(engine, rundir, count, 2)
    return {"counters": counters, "after": after, "evaluated": evaluated, "master": state(engine, StateKind.MASTER)}
