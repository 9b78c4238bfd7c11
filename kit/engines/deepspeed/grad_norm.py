"""Computes the gradient norm between backward and step, by DeepSpeed's own functions, so that a step can be skipped.

DeepSpeed's optimizers compute the norm inside ``step``. This module computes it before and passes the value to
``step``, so that it is not computed twice. kit emits no Muon: with it the values would differ, because Muon replaces
gradients before it takes their norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.moe.utils import split_params_grads_into_shared_and_expert_params
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import (
    clip_grad_norm_,
    combine_grad_norm_groups,
    get_global_norm,
    get_global_norm_of_tensors,
    get_weight_norm,
)
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


@torch.no_grad()
def scaled_norm(engine: DeepSpeedEngine) -> torch.Tensor | float:
    """Collective. The norm that the optimizer's ``step`` would compute: a scalar that includes fp16's loss scale. It is
    negative or not finite if a gradient is not finite."""
    optimizer: Any = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):  # stage3.py, step
        return combine_grad_norm_groups(optimizer._get_norm_groups())
    if isinstance(optimizer, DeepSpeedZeroOptimizer):  # stage_1_and_2.py, step
        if optimizer.cpu_offload:
            optimizer._wait_for_offload_copies()
        return optimizer.scaled_global_norm()
    if isinstance(optimizer, BF16_Optimizer):  # bf16_optimizer.py, step
        gradients, _ = optimizer.get_grads_for_norm()
        return get_global_norm_of_tensors(input_tensors=gradients, mpu=optimizer.mpu, norm_type=optimizer.norm_type)
    if isinstance(optimizer, FP16_UnfusedOptimizer):  # fp16/unfused_optimizer.py, step
        gradients = (split_params_grads_into_shared_and_expert_params(group)[0] for group in optimizer.fp16_groups)
        return get_global_norm([get_weight_norm(group, mpu=optimizer.mpu) for group in gradients if group])
    # Stage 0 in fp32 does not keep the norm by which it clips (engine.py, _take_model_step).
    return clip_grad_norm_(engine.module.parameters(), math.inf, mpu=engine.mpu)


def unscaled_norm(norm: torch.Tensor | float, loss_scale: float) -> float:
    """The norm divided by the loss scale; infinite if it is negative or not finite. ``norm``: a scalar of any dtype."""
    value = float(norm) / loss_scale  # the host waits for the norm only here
    return value if math.isfinite(value) and value >= 0 else math.inf


@contextmanager
def precomputed_norm(engine: DeepSpeedEngine, norm: torch.Tensor | float | None) -> Iterator[None]:
    """While entered, ZeRO's optimizers use ``norm``, the scalar of ``scaled_norm``. None: they compute the norm."""
    optimizer: Any = engine.optimizer
    stage3 = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
    if norm is None or not (stage3 or isinstance(optimizer, DeepSpeedZeroOptimizer)):
        yield  # stage 0 is for small models: computing the norm twice is cheap
        return
    name, answer = ("_get_norm_groups", [norm]) if stage3 else ("scaled_global_norm", norm)
    setattr(optimizer, name, lambda: answer)
    try:
        yield
    finally:
        delattr(optimizer, name)
