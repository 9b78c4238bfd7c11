"""Plain transformers and torch's AdamW in one process, nothing of kit's engines; and how far a layout lies from it.

Adam's epsilon is large: at 1e-8 the first steps are sign descent, and a doubled gradient moves the loss by 1e-6.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from kit.engines.protocol import IGNORE_INDEX
from kit.specs.job import Objective, OptimizerSpec
from kit.specs.model import ModelSpec
from tests.deepspeed import samples
from tests.support.checkpoints import on_disk
from tests.support.plain_adamw import trained
from tests.training import batches

GLOBAL_BATCH_SIZE = 8
OPTIMIZER = OptimizerSpec(eps=1e-4)
GRAD_CLIP = 0.7
"""Below the first steps' gradient norms: clipping is part of what is compared."""
NOTHING = 1e-6
"""Share of the whole gradient below which a parameter's is rounding: a bias of keys without rotary positions adds the
same to every score, and softmax is blind to it."""


@dataclass(frozen=True)
class Curve:
    """What training did; gradients of the first step and masters after the last, by Hugging Face name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]


def learning_rate(step: int) -> float:
    """Changes at every step, so that an engine that keeps its own shows."""
    return 1e-2 / (1 + step)


def reference(
    start: Path,
    steps: int,
    eps: float = OPTIMIZER.eps,
    spec: ModelSpec | None = None,
    objective: Objective = "pretrain",
    build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
) -> Curve:
    """Train from ``start``; ``spec``: of a model with experts; ``build``: another optimizer
    of these groups."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = AutoModelForSeq2SeqLM if objective == "seq2seq" else AutoModelForCausalLM
    model = kind.from_pretrained(start, local_files_only=True, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    values = {"betas": (OPTIMIZER.beta1, OPTIMIZER.beta2), "eps": eps, "weight_decay": OPTIMIZER.weight_decay}
    losses, norms, gradients = trained(
        parameters,
        steps,
        backward=functools.partial(backward if objective == "pretrain" else _backward_rows, model, objective=objective),
        clip=lambda: clip(list(parameters.values())),
        rate=learning_rate,
        build=build or functools.partial(torch.optim.AdamW, **values),
    )
    masters = {name: p.detach() for name, p in parameters.items()}
    return Curve(losses, norms, *(on_disk(spec, each) if spec else each for each in (gradients, masters)))


def backward(model: Any, step: int, objective: Objective = "pretrain") -> float:
    """The whole batch at once; the mean over the labels that count is torch's own reduction."""
    each = [batches.sample(step * GLOBAL_BATCH_SIZE + k) for k in range(GLOBAL_BATCH_SIZE)]
    inputs, labels = (torch.stack(column) for column in zip(*each, strict=True))
    logits = model(input_ids=inputs, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    return loss.item()


def _backward_rows(model: Any, step: int, objective: Objective) -> float:
    """A row at a time, so that nothing is padded."""
    rows = [samples.row(objective, step * GLOBAL_BATCH_SIZE + k) for k in range(GLOBAL_BATCH_SIZE)]
    tokens = sum(int((row.labels != IGNORE_INDEX).sum()) for row in rows)
    total = 0.0
    for row in rows:
        inputs = torch.from_numpy(row.inputs)[None]
        given = (
            {"input_ids": inputs}
            if row.source is None
            else {"input_ids": torch.from_numpy(row.source)[None], "decoder_input_ids": inputs}
        )
        logits = model(**given, use_cache=False).logits[0]
        loss = cross_entropy(logits, torch.from_numpy(row.labels), ignore_index=IGNORE_INDEX, reduction="sum") / tokens
        loss.backward()
        total += loss.item()
    return total


def clip(parameters: list[torch.nn.Parameter]) -> float:
    """Clip as torch does, by a norm in fp64: on a CPU torch's fp32 norm is off by 1e-5 at a few million elements."""
    norm = float(torch.stack([p.grad.double().square().sum() for p in parameters]).sum().sqrt())
    coefficient = min(1.0, GRAD_CLIP / (norm + 1e-6))
    for parameter in parameters:
        parameter.grad.mul_(coefficient)
    return norm


def gradient_error(found: Curve, expected: Curve) -> float:
    """Largest ‖g − g_ref‖ / ‖g_ref‖ over the parameters; where the reference has none but rounding, the layout must
    have none either."""
    assert found.gradients.keys() == expected.gradients.keys()
    nothing = NOTHING * expected.norms[0]
    norms = [((found.gradients[name] - g).norm().item(), g.norm().item()) for name, g in expected.gradients.items()]
    # An error of NaN is kept where the reference has a gradient.
    errors = [error / size if size >= nothing else math.inf for error, size in norms if max(size, error) >= nothing]
    return float(torch.tensor(errors).max())


def curve_error(found: list[float], expected: list[float]) -> float:
    """Largest relative difference over the steps."""
    pairs = itertools.zip_longest(found, expected, fillvalue=float("inf"))
    return float(torch.tensor([abs(x - x_ref) / abs(x_ref) for x, x_ref in pairs]).max())


def worst(found: Curve, expected: Curve) -> float:
    """Largest relative error of a first gradient, a loss, a norm and a master after the last step; NaN stays NaN."""
    masters = [float((found.masters[n] - t).norm() / (t.norm() or 1.0)) for n, t in expected.masters.items()]
    curves = [curve_error(found.losses, expected.losses), curve_error(found.norms, expected.norms)]
    assert found.masters.keys() == expected.masters.keys()
    return float(torch.tensor([gradient_error(found, expected), *curves, *masters]).max())
