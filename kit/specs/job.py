"""What is to be trained: everything about the job that changes the plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kit.specs.base import SPEC

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True, config=SPEC)
class OptimizerSpec:
    """AdamW with decoupled weight decay; one-dimensional parameters (norms, biases) are not decayed."""

    name: Literal["adamw"] = "adamw"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)


@dataclass(frozen=True, kw_only=True, config=SPEC)
class JobSpec:
    """A pretraining job."""

    objective: Literal["pretrain"] = "pretrain"
    seq_length: int = Field(default=4096, gt=0)
    """Tokens in a sequence."""
    global_batch_size: int = Field(default=512, gt=0)
    """Sequences in an optimizer step."""
    total_tokens: int = Field(default=100_000_000_000, gt=0)
    """Token budget; days and money are predicted for it, and it bounds the run unless run.steps does."""
    precision: Precision = "bf16"
    """bf16: bf16 compute with fp32 master weights and moments. fp32: everything in fp32."""
    optimizer: OptimizerSpec = OptimizerSpec()
    learning_rate: float = Field(default=3e-4, gt=0)
    """Peak learning rate; the schedule is in ``run.schedule``."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off."""
