"""Micro batches of a step: which rank reads which samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kit.engines.base import IGNORE_INDEX, MicroBatch
from kit.training.data.order import order
from kit.training.data.samples import GptSamples


@dataclass(frozen=True)
class Share:
    """A data-parallel rank's part of every step."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_rank: int
    dp_size: int

    def positions(self, micro_batch: int) -> list[int]:
        """Which samples of a step, k = (a·dp + dp_rank)·mbs + b, one micro batch holds."""
        first = (micro_batch * self.dp_size + self.dp_rank) * self.micro_batch_size
        return list(range(first, first + self.micro_batch_size))


def training_batches(samples: GptSamples, seed: int, samples_seen: int, share: Share) -> list[MicroBatch]:
    """This rank's micro batches of the step that follows ``samples_seen`` samples.

    Over all ranks they are samples ``order(seed, samples_seen)`` to ``order(seed, samples_seen + global batch)``,
    whatever the layout.
    """
    return [
        _micro_batch([samples[order(seed, len(samples), samples_seen + k)] for k in share.positions(a)])
        for a in range(share.gradient_accumulation_steps)
    ]


def validation_batches(samples: GptSamples, num_sequences: int, share: Share) -> list[MicroBatch]:
    """This rank's part of the first ``num_sequences`` samples, in file order.

    Every rank gets the same number of micro batches, as engines require; rows beyond the end are wholly masked.
    """
    total = min(num_sequences, len(samples))
    per_round = share.micro_batch_size * share.dp_size
    return [
        _micro_batch([samples[k] if k < total else _masked(samples[0]) for k in share.positions(a)])
        for a in range(-(-total // per_round))
    ]


def _masked(sample: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    inputs, labels = sample
    return inputs, np.full_like(labels, IGNORE_INDEX)


def _micro_batch(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> MicroBatch:
    inputs, labels = zip(*rows, strict=True)
    return MicroBatch(input_ids=torch.from_numpy(np.stack(inputs)), labels=torch.from_numpy(np.stack(labels)))
