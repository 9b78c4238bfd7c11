"""What is to be trained: everything about the job that changes the plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kit.specs.balancing import BalancingSpec
from kit.specs.base import SPEC

MOST_SEQUENCES = 10**7
"""The largest batch: a hundred times the largest batches; in ``run.steps`` steps they still fit into 64 bits."""
_MOST_TOKENS = 10**18
"""The longest job: ten thousand times all text there is, and what 64 bits count."""
_LONGEST_SEQUENCE = 10**8

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Objective = Literal["pretrain", "sft", "seq2seq"]
OptimizerName = Literal["adamw", "adamw-8bit", "adafactor", "sgd", "muon"]


@dataclass(frozen=True, kw_only=True, config=SPEC)
class OptimizerSpec:
    """An optimizer with decoupled weight decay; one-dimensional parameters (norms, biases) are not decayed."""

    name: OptimizerName = "adamw"
    """adamw-8bit: AdamW whose moments of matrices take a byte each, torch engine. The others are for the cost model."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, ge=1e-30, le=1)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0, le=100)


@dataclass(frozen=True, kw_only=True, config=SPEC)
class LoraSpec:
    """Low-rank adapters on frozen weights (arXiv 2106.09685)."""

    rank: int = Field(default=16, gt=0, le=65536)
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """Adapters are scaled by alpha/rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: Literal["attention", "all-linear"] = "all-linear"
    """Linear layers that get adapters: those of attention, or all but the output head."""
    four_bit: bool = False
    """QLoRA: frozen linear weights in nf4 (arXiv 2305.14314)."""


@dataclass(frozen=True, kw_only=True, config=SPEC)
class JobSpec:
    """A training job."""

    objective: Objective = "pretrain"
    """pretrain: every token counts. sft: rows with label masks. seq2seq: pairs, for an encoder-decoder."""
    lora: LoraSpec | None = None
    """Train adapters instead of the weights; null: all weights."""
    seq_length: int = Field(default=4096, gt=0, le=_LONGEST_SEQUENCE)
    """Tokens in a sequence."""
    global_batch_size: int = Field(default=512, gt=0, le=MOST_SEQUENCES)
    """Sequences in an optimizer step."""
    total_tokens: int = Field(default=100_000_000_000, gt=0, le=_MOST_TOKENS)
    """Token budget; days and money are predicted for it, and it bounds the run unless run.steps does."""
    precision: Precision = "bf16"
    """bf16: bf16 compute with fp32 master weights and moments. fp32: everything in fp32. fp16: as bf16, with loss
    scaling. fp8: bf16 with linear layers' products in fp8, by Transformer Engine (megatron) or torchao (torch)."""
    optimizer: OptimizerSpec = OptimizerSpec()
    learning_rate: float = Field(default=3e-4, ge=1e-12, le=100)
    """Peak learning rate; the schedule is in ``run.schedule``. A step of Adam changes a weight by about as much."""
    grad_clip: float = Field(default=1.0, ge=0, le=1e9)
    """Largest global gradient norm; 0 turns clipping off."""
    balancing: BalancingSpec | None = None
    """Balancing of experts. null: in pretraining what the model's family was published with, which a plan then shows;
    otherwise none."""
