"""Micro batches of a step: which rank reads which samples."""

from __future__ import annotations

from dataclasses import dataclass

from kit.engines.base import MicroBatch
from kit.training.data.order import order
from kit.training.data.samples import Samples


@dataclass(frozen=True)
class DataParallelShard:
    """A data-parallel rank's part of every step."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_rank: int
    dp_size: int

    @property
    def global_batch_size(self) -> int:
        """Samples of a step, over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp_size

    def positions(self, micro_batch: int) -> list[int]:
        """Samples of the step that one micro batch holds: k = (a·dp + dp_rank)·mbs + b."""
        first = (micro_batch * self.dp_size + self.dp_rank) * self.micro_batch_size
        return list(range(first, first + self.micro_batch_size))


def training_batches(
    samples: Samples, seed: int, samples_seen: int, shard: DataParallelShard, bucketed: bool = False
) -> list[MicroBatch]:
    """This rank's micro batches of the step that follows ``samples_seen`` samples.

    Over all ranks they are samples ``order(seed, samples_seen)`` to ``order(seed, samples_seen + global batch)``,
    whatever the layout. ``bucketed``: dealt out longest first, so that samples of one micro batch, and micro batches
    that ranks compute at the same time, are about equally long. The step's gradient does not depend on it.
    """
    if bucketed:
        drawn = [order(seed, len(samples), samples_seen + k) for k in range(shard.global_batch_size)]
        drawn.sort(key=lambda index: (-samples.length(index), index))
        indices = [[drawn[k] for k in shard.positions(a)] for a in range(shard.gradient_accumulation_steps)]
    else:
        indices = [
            [order(seed, len(samples), samples_seen + k) for k in shard.positions(a)]
            for a in range(shard.gradient_accumulation_steps)
        ]
    return [samples.micro_batch(each) for each in indices]


def validation_batches(samples: Samples, num_sequences: int, shard: DataParallelShard) -> list[MicroBatch]:
    """This rank's part of the first ``num_sequences`` samples, in file order.

    Every rank gets the same number of micro batches, as engines require; rows beyond the end are wholly masked.
    """
    total = min(num_sequences, len(samples))
    per_round = shard.micro_batch_size * shard.dp_size
    return [
        samples.micro_batch([k if k < total else None for k in shard.positions(a)])
        for a in range(-(-total // per_round))
    ]
