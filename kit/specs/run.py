"""How a run behaves: data, schedule, checkpoints, logging. Nothing here changes the plan or its hash."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kit.specs.base import SPEC


@dataclass(frozen=True, kw_only=True, config=SPEC)
class DataSpec:
    """Tokenised data: prefixes of Megatron ``.bin``/``.idx`` pairs, as ``kit convert data`` writes them."""

    train: str
    """Prefix of the training pair (without ``.bin``)."""
    validation: str | None = None
    """Prefix of the held-out pair."""
    seed: int = 1234
    """Seed of the sample order."""
    packing: bool = False
    """sft: put as many rows as fit into a sequence, each with its own positions and attention. A sample, of which
    job.global_batch_size make a step, is then such a pack."""


@dataclass(frozen=True, kw_only=True, config=SPEC)
class ScheduleSpec:
    """Learning rate as a function of the samples seen: linear warm-up, then cosine or constant."""

    kind: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = Field(default=2000, ge=0)
    """Optimizer steps of linear warm-up; scaled down to a tenth of a run shorter than ten times this."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final over peak learning rate."""


@dataclass(frozen=True, kw_only=True, config=SPEC)
class CheckpointSpec:
    """Native checkpoints on the way, a hub checkpoint at the end."""

    every_steps: int = Field(default=1000, gt=0)
    keep_last: int = Field(default=5, gt=0)
    """Older native checkpoints of this run are removed."""
    asynchronous: bool = False
    """Training stops only while the state is copied to host memory; a thread writes it. Needs engine=megatron, and
    host memory for one checkpoint."""


Monitor = Literal["tensorboard", "wandb", "csv_monitor", "comet"]


@dataclass(frozen=True, kw_only=True, config=SPEC)
class LoggingSpec:
    """What is written while training."""

    every_steps: int = Field(default=10, gt=0)
    """Steps between two lines on the terminal; metrics.jsonl has every step."""
    gradients_at_steps: tuple[int, ...] = ()
    """Steps (from 1) at which full gradients go to ``gradients/step-NNNNNN.safetensors``, for comparisons."""
    flops_profiler_at_step: int | None = Field(default=None, gt=0)
    """deepspeed: the step (from 1) that its FLOPS profiler measures, to ``flops_profile.txt``; null: none."""
    monitors: tuple[Monitor, ...] = ()
    """deepspeed: where it reports too, in its own words. Each needs its package."""


@dataclass(frozen=True, kw_only=True, config=SPEC)
class RunSpec:
    """Everything an engine needs at run time that planning does not."""

    model_path: str | None = None
    """Hugging Face directory to start from (weights, config, tokenizer); null: random weights from ``seed``."""
    nvme_path: str | None = None
    """Directory on every node's own disk, for what the layout offloads to nvme. A run makes one folder there for its
    swap files, and removes it when it ends."""
    data: DataSpec
    steps: int | None = Field(default=None, gt=0)
    """Optimizer steps; null: as many as ``job.total_tokens`` makes."""
    seed: int = 1234
    """Seed of initialisation and dropout."""
    schedule: ScheduleSpec = ScheduleSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    logging: LoggingSpec = LoggingSpec()
    validation_every_steps: int | None = Field(default=None, gt=0)
    """Steps between evaluations on the held-out data; null: only at the end."""
    validation_sequences: int = Field(default=64, gt=0)
    """Sequences of one evaluation, the first of the held-out set in file order."""
