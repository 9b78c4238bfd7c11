"""What runs inside a pool of workers, and the same in one process of plain transformers, to compare with."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kit.engines.full_tensors import full_tensors
from kit.engines.huggingface.adapters import checkpoint_shapes, trainable
from kit.engines.huggingface.buffers import SavedBuffers
from kit.engines.protocol import IGNORE_INDEX, GeneratedSource, LossSum, MicroBatch, StateKind
from kit.specs.extra import Extra
from kit.specs.job import OptimizerSpec
from kit.specs.model import ModelSpec
from tests.support import tiny
from tests.support.balance import PlainRouters
from tests.support.checkpoints import on_disk
from tests.support.plain_adamw import trained
from tests.support.workers import pool
from tests.training import cases as training
from tests.training import runs

MICRO_BATCH_SIZE = 2
GLOBAL_BATCH_SIZE = 8
LEARNING_RATE = 1e-2
EPS = 1e-3
"""Early Adam is sign descent: it hides small gradient errors, and amplifies rounding. With 1e-4, transformers in fp32
and in fp64 are already 1.2e-5 apart after ten steps (norms, Qwen3)."""
JOB = {
    "learning_rate": LEARNING_RATE,
    "grad_clip": 0.5,  # below the first norms, so that clipping takes part
    "optimizer": OptimizerSpec(eps=EPS, weight_decay=0.1),
}


@dataclass
class Trajectory:
    """What a run did, as seen by one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Labels that counted: in the first step's evaluation, then step by step."""
    evaluated: list[float] = field(default_factory=list)
    """Loss of the first step's batch, evaluated before it is trained on."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of the first step, under Hugging Face names; empty on all ranks but the main one."""
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights before the first step: what came in from the Hugging Face directory, out again."""
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    """After the last step."""
    routing: dict[str, float | None] = field(default_factory=dict)
    """Metrics of the last step's experts."""


KINDS = (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
HF_DIRECTORY = "model"
"""Beside the run directories of a shape (conftest.py)."""


def run_directory(
    path: Path,
    spec: ModelSpec,
    job: dict[str, Any] | None = None,
    model_path: str | None = HF_DIRECTORY,
    extra: dict[str, Any] | None = None,
    **layout: Any,
) -> Any:
    """A run directory, for the Megatron engine unless ``layout`` says otherwise: GLOBAL_BATCH_SIZE sequences a step.
    ``extra``: keys of transformer_config."""
    size = layout.get("micro_batch_size", MICRO_BATCH_SIZE)
    layout = {
        "engine": "megatron",
        "implementation": "local",
        "micro_batch_size": size,
        "gradient_accumulation_steps": GLOBAL_BATCH_SIZE // size // layout.get("dp", 1),
    } | layout
    plan = tiny.plan(spec, job=JOB | (job or {}), **layout)
    plan = dataclasses.replace(plan, extra=Extra(megatron={"transformer_config": extra} if extra else {}))
    rundir = tiny.run_directory(path, plan, model_path=model_path and str(path.parent / model_path))
    return runs.with_settings(rundir)


def step_batch(vocab_size: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of one step, (GLOBAL_BATCH_SIZE, SEQ_LENGTH); sequence i counts fewer tokens than i + 1."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(vocab_size, (GLOBAL_BATCH_SIZE, tiny.SEQ_LENGTH + 1), generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    for index in range(GLOBAL_BATCH_SIZE):
        labels[index, 3 * (index + 1) :] = IGNORE_INDEX
    return inputs, labels


def step_documents(step: int) -> torch.Tensor:
    """Lengths of the three documents in each row of a step, (GLOBAL_BATCH_SIZE, 3)."""
    generator = torch.Generator().manual_seed(1000 + step)
    first = torch.randint(1, tiny.SEQ_LENGTH // 2, (GLOBAL_BATCH_SIZE, 2), generator=generator)
    return torch.cat([first, tiny.SEQ_LENGTH - first.sum(1, keepdim=True)], dim=1)


def micro_batches(
    vocab_size: int, step: int, dp_rank: int, dp_size: int, packed: bool = False, size: int = MICRO_BATCH_SIZE
) -> list[MicroBatch]:
    """One data-parallel rank's part of a step: neighbouring sequences, so that ranks count unequal tokens."""
    share = GLOBAL_BATCH_SIZE // dp_size
    rows = list(step_batch(vocab_size, step))
    if packed:
        lengths = step_documents(step).tolist()
        rows.append(torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]))
        rows.append(torch.stack([torch.arange(3).repeat_interleave(torch.tensor(row)) for row in lengths]))
    own = (tensor[dp_rank * share : (dp_rank + 1) * share].split(size) for tensor in rows)
    return [MicroBatch(*fields) for fields in zip(*own, strict=True)]


def batches_of(engine: Any, rundir: Any, step: int, packed: bool = False) -> list[MicroBatch]:
    """This rank's part of a step, in turns of two sets of a blend."""
    plan = rundir.plan
    size = plan.layout.micro_batch_size
    found = micro_batches(plan.model.vocab_size, step, engine.dp_rank, engine.dp_size, packed, size)
    return [dataclasses.replace(each, data_set=number % 2) for number, each in enumerate(found)]


def sets_are_the_step(engine: Any, loss: LossSum, copies: int) -> bool:
    """Whether losses and labels by set of a blend, of which ranks have those of their own micro batches, are those of
    the step; so many ranks compute the same."""
    sums = torch.zeros(2, dtype=torch.float64)
    for each in engine.set_sums.values():
        sums += torch.tensor(each, dtype=torch.float64)
    torch.distributed.all_reduce(sums)
    whole = [copies * loss.loss_sum, copies * loss.tokens]
    return sums.tolist() == pytest.approx(whole, rel=1e-6) and engine.set_sums.keys() <= {0, 1}


def inside(rundir: Any, look: Callable[..., Any], *arguments: Any) -> Any:
    """Inside a worker: ``look(engine, rundir, *arguments)`` of a fresh engine."""
    with closing(training.build(rundir)) as engine:
        return look(engine, rundir, *arguments)


class RandomAdapters(GeneratedSource):
    """Adapters whose B is random too: with B = 0, the gradients of A are 0."""

    def read(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return 0.05 * torch.randn(self._shapes[name], generator=generator)


def train(rundir: Any, steps: int, packed: bool = False, fault: str | None = None) -> Trajectory:
    """Inside a worker: build the engine, train, close; where one is named with a fault of
    ``tests/system/parity/faults.py``."""
    from tests.system.parity.faults import planted

    with planted(fault):
        return inside(rundir, _train, steps, packed, fault)


def _train(engine: Any, rundir: Any, steps: int, packed: bool, fault: str | None) -> Trajectory:
    if rundir.plan.job.lora is not None:
        adapters = RandomAdapters(checkpoint_shapes(rundir.plan.model, rundir.plan.job.lora), seed=0)
        engine.import_state(StateKind.MASTER, adapters)
    result = Trajectory(initial=export(engine, StateKind.MASTER))
    evaluated = engine.evaluate(batches_of(engine, rundir, 0, packed))
    result.evaluated.append(evaluated.mean)
    result.tokens.append(evaluated.tokens)
    for step in range(steps):
        loss = engine.forward_backward(batches_of(engine, rundir, step, packed))
        assert fault or sets_are_the_step(engine, loss, rundir.plan.layout.tp)
        if step == 0:
            result.gradients = export(engine, StateKind.GRADIENT)
        result.losses.append(loss.mean)
        result.tokens.append(loss.tokens)
        result.norms.append(engine.apply(LEARNING_RATE).gradient)
    result.masters = export(engine, StateKind.MASTER)
    engine.evaluate(batches_of(engine, rundir, steps, packed))  # which is none of the step's metrics
    result.routing = dict(engine.routing_metrics())
    return result


export = full_tensors
"""Of an engine and a kind: everything that it streams; empty but on the main rank."""


def reference(
    spec: ModelSpec,
    model: torch.nn.Module,
    steps: int,
    grad_clip: float = JOB["grad_clip"],
    eps: float = EPS,
    packed: bool = False,
    routers: PlainRouters | None = None,
    heads: tuple[float, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] | None = None,
) -> Trajectory:
    """Trains with plain transformers and torch.optim.AdamW in one process, all sequences in one batch. With adapters in
    the model, trains those. ``heads``: factor and summed loss of heads of multi-token prediction."""
    parameters = trainable(model)
    buffers = SavedBuffers(model if all(p.requires_grad for p in model.parameters()) else torch.nn.Module(), spec)

    def weights() -> dict[str, torch.Tensor]:
        held = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        return on_disk(spec, held) | dict(buffers.export(StateKind.MASTER))

    result = Trajectory(initial=weights())

    def backward(step: int) -> float:
        inputs, labels = step_batch(model.config.vocab_size, step)
        logits = _logits(model, inputs, step_documents(step) if packed else None)
        count = int((labels != IGNORE_INDEX).sum())
        loss = (
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum") / count
        )
        more = 0.0 if routers is None else routers.loss(GLOBAL_BATCH_SIZE)
        if heads is not None:
            factor, summed = heads
            more = factor * summed(inputs, labels) / count
        (loss + more).backward()
        if routers is not None:
            routers.move_biases()
        result.tokens += [count] * (2 if step == 0 else 1)
        return loss.item()

    result.losses, result.norms, gradients = trained(
        parameters,
        steps,
        backward=backward,
        clip=lambda: float(torch.nn.utils.clip_grad_norm_(parameters.values(), grad_clip)),
        rate=lambda step: LEARNING_RATE,
        build=functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), eps=eps, weight_decay=0.1),
        # gpt-oss holds the biases of all experts in one matrix.
        decays=lambda name, parameter: parameter.ndim > 1 and not name.endswith("_bias"),
    )
    result.gradients = on_disk(spec, gradients) | dict(buffers.export(StateKind.GRADIENT))
    result.evaluated, result.masters = result.losses[:1], weights()
    return result


def _logits(model: torch.nn.Module, inputs: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """(rows, sequence, vocabulary); a document alone, as if there were no other in its row."""
    if documents is None:
        return model(input_ids=inputs, use_cache=False).logits.float()
    rows = (row.split(lengths) for row, lengths in zip(inputs, documents.tolist(), strict=True))
    alone = ([model(input_ids=part[None], use_cache=False).logits[0].float() for part in parts] for parts in rows)
    return torch.stack([torch.cat(each) for each in alone])


BOUND = 1e-5
"""Largest relative error of a gradient, a loss, a norm, a weight."""


def differences(found: Trajectory, expected: Trajectory) -> list[str]:
    """Every quantity that is further than ``BOUND`` from the reference; empty if the runs agree."""
    return [
        f"{what}[{place}]: off by {error:.2e}"
        for what, errors in _errors(found, expected).items()
        for place, error in errors.items()
        if not error <= BOUND
    ]


def _errors(found: Trajectory, expected: Trajectory) -> dict[str, dict[Any, float]]:
    """Infinite where something is missing, and for tokens and initial weights, which must be exact, if they are not."""
    errors: dict[str, dict[Any, float]] = {"tokens": {0: 0.0 if found.tokens == expected.tokens else torch.inf}}
    for what in ("evaluated", "losses", "norms"):
        pairs = zip(getattr(found, what), getattr(expected, what), strict=True)
        errors[what] = {step: abs(a - b) / abs(b) for step, (a, b) in enumerate(pairs)}
    for what in ("initial", "gradients", "masters"):
        ours, theirs = getattr(found, what), getattr(expected, what)
        errors[what] = dict.fromkeys(ours.keys() ^ theirs.keys(), torch.inf)
        for name in ours.keys() & theirs.keys():
            error = ((ours[name] - theirs[name]).norm() / (theirs[name].norm() or 1.0)).item()  # of a buffer: 0
            errors[what][name] = error if what != "initial" or torch.equal(ours[name], theirs[name]) else torch.inf
    return errors


def steps(engine: Any, rundir: Any, first: int, count: int = 2) -> list[float]:
    """Losses and gradient norms of some steps."""
    return [
        number
        for step in range(first, first + count)
        for number in (
            engine.forward_backward(batches_of(engine, rundir, step)).mean, engine.apply(LEARNING_RATE).gradient
        )
    ]  # fmt: skip


def resumed(rundir: Any, path: Path, fault: str | None = None) -> list[dict[str, Any]]:
    """``tests.training.cases.resumed`` of each rank, in a directory of its own."""
    own, layout = dataclasses.replace(rundir, path=path), rundir.plan.layout
    return pool(layout.engine, layout.world_size).run(training.resumed, own, LEARNING_RATE, batches_of, 1, fault)
